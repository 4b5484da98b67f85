"""Secure aggregation: the server learns the sum of the clients' uploads, and no single upload.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS
2017, arranged so that each client sends one message per round if no client drops out.

    client       one client's side: masks an upload, helps to open the sum
    server       the server's side: collects masked rows and opens their sum
    messages     the messages as dataclasses, and the errors of the protocol
    wire         messages as bytes, and back with checks
    keys         key agreement, masks and encryption
    shamir       secret sharing
    fixed_point  numbers as integers modulo a power of two
    layout       an upload as one row of numbers
    transport    how a server reaches the clients; nothing else here knows of a transport

docs/privacy.md says what is protected, against whom, and what the single message costs.
"""
