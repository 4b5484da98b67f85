"""Privacy of uploads: secure aggregation, clipping and noise, and the guarantee that they give.

    policy              how the uploads of a run are collected, from the config's `privacy` section
    noise               clipping and Gaussian noise of whole uploads
    gaussian_mechanism  clipping of one matrix, and the noise for a given epsilon
    renyi               epsilon of a number of noisy sums, by Renyi accounting
    secure_collector    collects masked uploads and opens nothing but their sum
    secagg/             the protocol of secure aggregation, without any transport

docs/privacy.md says what is protected, and against whom.
"""
