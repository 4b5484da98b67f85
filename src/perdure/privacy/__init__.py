"""Privacy of uploads: a chain of mechanisms that simulations, servers and nodes walk alike.

    mechanism     what a mechanism is: its part on clients and on the server, and what is said of it
    chain         all mechanisms in their order, and the chain of a run
    min_rows      clients with few rows send nothing
    noise         clipping and Gaussian noise of uploads
    secure_sums   secure aggregation: masked uploads, of which only the sum can be opened
    accounting    the guarantee of Gaussian noise: Renyi accounting, and the noise for an epsilon
    secagg/       the protocol of secure aggregation, without any transport

docs/privacy.md says what is protected, and against whom.
"""
