"""What is read (sources), who holds what (partition), what arrives when (streams)."""
