"""Refuses options of a server that contradict each other, or ask for what cannot be done."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from urllib.parse import urlsplit

from engine_core.config import EngineConfig, check_cluster_key, check_kept_blocks, cluster_key_needed
from server.options.connection_options import ConnectionOptions
from server.options.media_options import read_media_io
from server.options.option_parsing import OptionError
from server.options.server_flags import ServerConfig
from worker.options import read_profiler

_GRPC_PORT = ":4317"
_PRIVATE = (
    "give an address of a private network, such as WireGuard's, or --insecure if strangers cannot reach it"
)


def check(config: ServerConfig) -> None:
    """Raises OptionError if options contradict each other, or cannot do what they are meant for."""
    if "*" in config.allowed_origins and config.allow_credentials:
        raise OptionError(
            "--allow-credentials with --allowed-origins * would let every website act as your users; "
            "name the origins"
        )
    _check_tls(config.connections)
    if not config.host:
        raise OptionError("--host: an empty address would be all of them; write 0.0.0.0 if you mean that")
    if config.uds == "":
        raise OptionError("--uds: an empty path is no file that clients could find; leave it out or give one")
    if not config.api_server_count and not config.headless:
        raise OptionError(
            "--api-server-count 0 goes with --headless: a server needs one API process at least"
        )
    if not all(name.strip() for name in config.served_model_name):
        raise OptionError("--served-model-name: an empty name calls nothing; leave it out or give one")
    if not all(key.strip() for key in config.access.api_key):
        raise OptionError("--api-key: an empty key protects nothing; leave it out or give one")
    check_traces(config.reports.otlp_traces_endpoint)
    try:
        config.media.most_of(())
        _ = config.media.most_frames
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        config.adapters.check(config.model_names)
        config.engine.worker.lora.check()
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        read_media_io(config.media.media_io_kwargs)
    except ValueError as error:
        raise OptionError(f"--media-io-kwargs: {error}") from error
    _check_nodes(config)
    _check_replicas(config)
    if config.engine.enable_sleep_mode and (config.engine.nnodes > 1 or config.replicas.together):
        raise OptionError(
            "--enable-sleep-mode needs each replica on one machine, with experts of its own: leave it out, "
            "or --nnodes and --enable-expert-parallel"
        )
    _check_plugins(config.engine)


def _check_plugins(engine: EngineConfig) -> None:
    """Raises OptionError if plug-ins of workers cannot do what they are meant for."""
    if engine.worker.logits_processors and engine.speculative_config:
        raise OptionError(
            "--logits-processors see one token after the other, and --speculative-config computes several at "
            "once: leave one of them out"
        )
    try:
        read_profiler(engine.worker.profiler_config)
    except ValueError as error:
        raise OptionError(str(error)) from error


def _check_tls(options: ConnectionOptions) -> None:
    """Raises OptionError if HTTPS or certificates of clients are asked for by halves."""
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise OptionError("--ssl-keyfile and --ssl-certfile go together; give both or none")
    of_https = {
        "--ssl-ca-certs asks clients for certificates": options.ssl_ca_certs,
        "--ssl-cert-reqs asks clients for certificates": options.client_certificates,
        "--ssl-ciphers chooses ciphers": options.ssl_ciphers,
        "--enable-ssl-refresh renews certificates": options.enable_ssl_refresh,
    }
    if not options.ssl_certfile and (
        without := next((why for why, given in of_https.items() if given), None)
    ):
        raise OptionError(f"{without}, which plain HTTP cannot: give --ssl-certfile and --ssl-keyfile too")
    if options.client_certificates and not options.ssl_ca_certs:
        raise OptionError(
            f"--ssl-cert-reqs {options.client_certificates} needs --ssl-ca-certs, the authorities that sign "
            "certificates of clients"
        )
    if options.ssl_ca_certs and not options.client_certificates:
        raise OptionError(
            "--ssl-ca-certs with --ssl-cert-reqs 0 would ask no client for a certificate: give 1 or 2, or "
            "leave the authorities out"
        )


def check_traces(endpoint: str | None) -> None:
    """Raises OptionError if spans cannot be sent to where they shall be."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError(
            f"--otlp-traces-endpoint: {endpoint!r} is not an http or https URL; spans are sent by OTLP over "
            "HTTP, whose port is 4318, not 4317, that of gRPC"
        )
    if urlsplit(endpoint).netloc.endswith(_GRPC_PORT):
        raise OptionError(
            f"--otlp-traces-endpoint: {endpoint!r} names the port at which collectors speak gRPC; spans "
            "are sent by OTLP over HTTP: give http://HOST:4318/v1/traces"
        )
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise OptionError(
            "--otlp-traces-endpoint needs OpenTelemetry: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )


def _check_nodes(config: ServerConfig) -> None:
    """Check the options that spread one model over several machines."""
    engine, headless = config.engine, config.headless
    nodes, rank = engine.nnodes, engine.node_rank
    if rank >= nodes:
        raise OptionError(f"--node-rank {rank}: of --nnodes {nodes} the last is {nodes - 1}")
    if rank and not headless:
        raise OptionError(f"--node-rank {rank} goes with --headless: the API is on the machine of rank 0")
    if nodes == 1:
        return
    if headless and not rank:
        raise OptionError("--headless with --nnodes is for --node-rank 1 and up: rank 0 has the API")
    if config.data_parallel_size > 1:
        raise OptionError(
            "--nnodes spreads one replica over machines, and --data-parallel-size adds replicas: use one of "
            "them; several spread replicas are several servers behind a load balancer"
        )
    _check_key(engine, f"--nnodes {nodes}")
    if _is_public(engine.master_addr) and not config.insecure:
        raise OptionError(
            f"--master-addr {engine.master_addr} is a public address, and what ranks exchange is not "
            f"encrypted: {_PRIVATE}"
        )


def _check_replicas(config: ServerConfig) -> None:
    """Check the options that put replicas on several machines, or let them share experts."""
    # after `serve` has checked whose `models` this is
    from engine_core.options.expert_options import transport_of
    from engine_core.options.speculation_options import read_guess_options

    engine, replicas, headless = config.engine, config.replicas, config.headless
    size = replicas.size
    try:
        transport_of(engine)
        read_guess_options(engine)
        check_kept_blocks(engine)
    except ValueError as error:
        raise OptionError(str(error)) from error
    if replicas.together and len(replicas.local) < size:
        _check_sharing(config)
    if replicas.first and not (headless or replicas.apart):
        raise OptionError("--data-parallel-start-rank goes with --headless: the API's machine has the first")
    if replicas.by_ray:
        _check_ray(config)
    if config.data_parallel_external_lb or replicas.apart:
        _check_balanced_server(config)
    if replicas.here < 0 or replicas.first + replicas.here > size:
        raise OptionError(
            f"--data-parallel-size {size} has the replicas 0 to {size - 1}: there are none for "
            f"--data-parallel-start-rank {replicas.first} and --data-parallel-size-local {replicas.here}"
        )
    if headless and engine.nnodes == 1:
        if not replicas.here:
            raise OptionError(
                "--headless with --data-parallel-size-local 0 has nothing to run; give 1 or more"
            )
        _check_key(engine, "--headless, which runs replicas for another machine's API,")
    elif replicas.elsewhere and not (replicas.by_ray and engine.cluster_key is None):
        _check_key(engine, f"--data-parallel-size-local {replicas.here}, which lets other machines join,")


def _check_sharing(config: ServerConfig) -> None:
    """Check replicas of several machines that share experts, and so exchange tensors."""
    replicas = config.replicas
    if replicas.by_ray:
        raise OptionError(
            "--data-parallel-backend ray places replicas wherever there is room, and those that share "
            "experts (--enable-expert-parallel) meet at an address that all know before: start the machines "
            "with --headless"
        )
    if not (replicas.here or config.headless):
        raise OptionError(
            "--data-parallel-size-local 0: the first of the replicas that share experts "
            "(--enable-expert-parallel) runs beside the API: give 1 or more"
        )
    if replicas.port == 1:
        raise OptionError(
            "--data-parallel-rpc-port 1: replicas that share experts take the port before, too: give another"
        )
    if _is_public(replicas.address) and not config.insecure:
        raise OptionError(
            f"--data-parallel-address {replicas.address} is a public address, and what replicas that share "
            f"experts exchange is not encrypted: {_PRIVATE}"
        )


def _check_ray(config: ServerConfig) -> None:
    """Check the options of a server that has Ray place its replicas."""
    replicas, flag = config.replicas, "--data-parallel-backend ray"
    if replicas.size == 1:
        raise OptionError(
            f"{flag} places replicas, and there is one: give --data-parallel-size, or have Ray place the "
            "workers of one replica by --distributed-executor-backend ray"
        )
    if config.headless or replicas.apart:
        other = "--headless" if config.headless else "what says that other machines have servers"
        raise OptionError(f"{flag} starts replicas from one server: leave out {other}, or {flag}")
    if config.engine.distributed_executor_backend == "ray":
        raise OptionError(
            f"{flag} places whole replicas, and --distributed-executor-backend ray the workers of one: leave "
            "out one of them"
        )


def _check_balanced_server(config: ServerConfig) -> None:
    """Check the options of a server that is one of several behind a load balancer."""
    rank, size = config.data_parallel_rank, config.data_parallel_size
    flag = "--data-parallel-hybrid-lb" if rank is None else "--data-parallel-rank"
    if rank is None and config.data_parallel_external_lb:
        raise OptionError("--data-parallel-external-lb goes with --data-parallel-rank: which server is this?")
    if rank is not None and rank >= size:
        raise OptionError(f"{flag} {rank}: of --data-parallel-size {size} the last is {size - 1}")
    if rank is not None and (config.data_parallel_hybrid_lb or config.data_parallel_start_rank):
        raise OptionError(
            f"{flag} is a server for one replica, and --data-parallel-hybrid-lb, with "
            "--data-parallel-start-rank, one for each machine: use one of them"
        )
    if config.headless:
        raise OptionError(f"{flag} is for machines that have a server: leave out --headless")
    if config.replicas.together:
        _check_key(config.engine, f"{flag}, which lets replicas of several servers share experts,")


def _check_key(engine: EngineConfig, what: str) -> None:
    if engine.cluster_key is None:
        raise OptionError(str(cluster_key_needed(what)))
    try:
        check_cluster_key(engine.cluster_key)
    except ValueError as error:
        raise OptionError(f"--cluster-key: {error}") from error


def _is_public(address: str) -> bool:
    """Whether strangers may be able to reach it. Of a name nobody can tell before it is looked up."""
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address that is listened to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
