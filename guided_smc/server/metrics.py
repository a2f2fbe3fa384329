"""What Prometheus is told."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from guided_smc.results import Result, Step

disable_created_metrics()  # when each series began is of no use here

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "guided_smc_"
        self.requests = Counter(
            f"{name}requests", "Requests by endpoint and status.", ["endpoint", "status"],
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            f"{name}request_seconds", "Of whole requests.", ["endpoint"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.cancelled = Counter(
            f"{name}cancelled", "Requests whose client went away or did not read.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._queue = Gauge(f"{name}queue", "Answers that wait.", registry=registry)
        self._groups = Gauge(f"{name}groups", "Answers that are being made.", registry=registry)
        self._particles = Gauge(f"{name}particles", "Particles that grow.", registry=registry)
        self._reserved = Gauge(
            f"{name}cached_tokens_reserved", "Tokens of cache kept free for what runs.",
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            f"{name}tokens", "Tokens read (prompt), returned, and drawn for all particles.",
            ["kind"], registry=registry,
        )  # fmt: skip
        self._ess = Histogram(
            f"{name}ess_share", "Effective sample size by N, at each step.", buckets=_SHARES,
            registry=registry,
        )  # fmt: skip
        self._step_seconds = Histogram(
            f"{name}step_seconds", "Of steps, all requests together.", buckets=_STEP_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._phase_seconds = Counter(
            f"{name}phase_seconds", "Of steps: draft, mask, verify, ...; and prefill.",
            ["phase"], registry=registry,
        )  # fmt: skip
        self._restarts = Counter(
            f"{name}restarts", "Fresh starts, all particles having died.", registry=registry
        )
        self.engine_failures = Counter(
            f"{name}engine_failures", "Steps that failed through no request's fault.",
            registry=registry,
        )  # fmt: skip
        self.compile_seconds = Histogram(
            f"{name}compile_seconds", "To compile a schema, pattern or grammar.", ["outcome"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.compile_cache = Counter(
            f"{name}compile_cache", "Constraints asked for, by whether they were at hand.",
            ["found"], registry=registry,
        )  # fmt: skip

    def step(self, seconds: float) -> None:
        """One step of the engine."""
        self._step_seconds.observe(seconds)

    def population_step(self, step: Step) -> None:
        """One step of one request."""
        self._ess.observe(step.ess / len(step.log_weights))
        for phase, seconds in step.seconds.items():
            self._phase_seconds.labels(phase).inc(seconds)

    def result(self, result: Result[Any]) -> None:
        """One answer."""
        self._tokens.labels("prompt").inc(result.usage.prompt_tokens)
        self._tokens.labels("returned").inc(len(result.token_ids))
        self._tokens.labels("particles").inc(result.usage.particle_tokens)
        self._restarts.inc(result.restarts)
        self._phase_seconds.labels("prefill").inc(result.usage.seconds.get("prefill", 0.0))

    def load(self, *, waiting: int, groups: int, particles: int, reserved: int) -> None:
        """What there is to do now."""
        self._queue.set(waiting)
        self._groups.set(groups)
        self._particles.set(particles)
        self._reserved.set(reserved)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)
