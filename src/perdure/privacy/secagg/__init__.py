"""Secure aggregation: the server learns the sum of the clients' uploads, and no single upload.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS
2017, arranged so that each client sends one message per round if no client drops out.

    client    one client's side: masks an upload, helps to open the sum; simulated clients
    server    the server's side: collects masked rows and opens their sum
    messages  the messages with their bounds, as bytes and back, and the errors of the protocol
    keys      key agreement, masks, encryption and secret sharing
    layout    an upload as one row of numbers modulo a power of two
    journal   how a server reaches the clients, and the sums that it asked for

docs/privacy.md says what is protected, against whom, and what the single message costs.
"""
