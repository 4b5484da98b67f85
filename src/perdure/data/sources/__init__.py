"""One file per kind of source: each reads a source into `perdure.data.source.Source`."""
