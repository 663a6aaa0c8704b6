"""How the request distributor listens, to which nodes it sends requests, and how long it waits for them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncllm.config.listen import ListenConfig
from asyncllm.config.lmdeploy_settings import DISTRIBUTORS
from asyncllm.config.settings import MAX_COUNT, check_address

__all__ = ["DistributorConfig", "RoutingStrategy"]

RoutingStrategy = Literal["random", "min_expected_latency", "min_observed_latency", "prefix"]


class DistributorConfig(ListenConfig, frozen=True, kw_only=True):
    """How the request distributor listens, to which nodes it sends requests, and how long it waits for them."""

    UNSUPPORTED = DISTRIBUTORS

    server_port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one.")] = 8000
    admin_key_file: Annotated[
        str | None,
        Meta(description="File with one key per line for /nodes/*; None: the API keys, if any, open these routes too."),
    ] = None
    routing_strategy: Annotated[
        RoutingStrategy,
        Meta(
            description="Which node answers. random: any, in proportion to the nodes' speed; min_expected_latency: "
            "fewest unfinished requests for its speed; min_observed_latency: quickest of late; prefix: the one that "
            "has answered prompts with the same beginning, unless it is busy."
        ),
    ] = "min_expected_latency"
    nodes: Annotated[
        list[str] | None,
        Meta(description="Addresses of servers, as http://host:port. Others are added by /nodes/add or --proxy-url."),
    ] = None
    node_key_file: Annotated[
        str | None,
        Meta(description="File with the key that all nodes take; None: clients' own keys are passed on to them."),
    ] = None
    state_folder: Annotated[
        str | None,
        Meta(description="Folder of the file that keeps the added nodes for the next start; None: they are not kept."),
    ] = None
    max_unfinished: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="Maximum number of unfinished requests per node; more wait.")
    ] = 1024
    max_waiting: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="Maximum number of waiting requests; more are refused with 503.")
    ] = 1024
    wait_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum seconds that a request waits for a node with room.")
    ] = 10.0
    connect_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum seconds for a node to accept a connection or answer a check.")
    ] = 5.0
    health_interval: Annotated[float, Meta(gt=0, le=3600, description="Seconds between two checks of a node.")] = 2.0
    session_ttl: Annotated[
        float,
        Meta(gt=0, le=MAX_COUNT, description="Idle seconds after which the node of a conversation is forgotten."),
    ] = 3600.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=MAX_COUNT, description="Maximum size of a request body.")] = (
        32 * 2**20
    )

    def _check(self) -> None:
        super()._check()
        for node in self.nodes or ():
            check_address(node, "nodes")
