"""A real federation: the same loop, methods and results, with clients on other machines.

    apps               Flower's two apps: the server's runs the loop, the nodes' serves requests
    messages           requests and uploads: fields with bounds, as bytes and back
    evaluation_counts  the counts of an evaluation, as a message and over all nodes
    settings           the section `engine: {kind: flower}` of a config

The server's side (server/)

    engine      the engine that sends requests to nodes
    transport   how requests reach the nodes over Flower, with time limits
    replies     reads and checks the replies of nodes
    stream      the stream without data, from what the config says about the nodes' data
    superlink   what other machines, and what users of the server's machine, reach of it

The nodes' side (node/)

    worker      serves a request: trains, evaluates, answers for secure sums
    uploads     the work of a node's clients, their uploads, keys and secret draws
    policy      what the owner of a node allows, and requests that the run does not have
    run         what a node stores of a run, and the log of what it sent
    data        reads the local data of a node
    executor    serves a node's requests in forks of one process

Creating and running a federation (admin/)

    folders        creates, reads and writes the folders of a federation
    keys           certificates and keys, their end, and new ones
    submission     runs that were submitted to a server
    trial          a whole federation on this machine, for one run
    processes      starts and ends Flower's server, nodes and commands
    child_scripts  what stands between this process and Flower's, such as the watchdog

docs/federation.md describes how to use it.
"""
