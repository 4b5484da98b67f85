"""Secure aggregation: the server learns the sum of what clients send and nothing of one client.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS
2017, arranged so that a round in which nobody drops out costs a client one message. participant.py
is a client's half, aggregator.py the server's; they speak in bytes (wire.py) and know no transport.
docs/privacy.md says what is protected, against whom, and what is given up for the one message.
"""
