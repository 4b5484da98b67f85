"""A real federation: the same loop, methods and results, with clients on other machines.

The server's side

    apps            Flower's two apps: the server's runs the loop, the nodes' serves requests
    engine          the engine that sends requests to nodes
    transport       how requests reach the nodes over Flower, with time limits
    node_replies    reads and checks the replies of nodes
    server_stream   the stream without data, from what the config says about the nodes' data

The nodes' side

    node_worker     serves a request: trains, evaluates, answers for secure sums
    request_checks  refuses requests that the run does not have
    node_data       reads the local data of a node
    client_states   the last states of the node's clients
    secagg_store    the keys and answers of secure sums
    secret_draws    draws that do not derive from the run's seed

Both sides

    protocol        requests, uploads and counts as bytes

Creating and running a federation

    scaffold        creates the folders of a new federation
    folders         reads and writes these folders
    keys            certificates and keys
    certificates    the end of certificates, and new ones
    submission      runs that were submitted to a server
    trial           a whole federation on this machine, for one run
    server_process  Flower's server as a child process
    superlink       what other machines, and what users of the server's machine, reach of it
    node_process    Flower's node as a child process
    executor        serves a node's requests in forks of one process
    processes       starts and ends child processes
    watchdog        ends a command when the process that started it ends
    flwr_calls      calls Flower's command several times in one process

docs/federation.md describes how to use it.
"""
