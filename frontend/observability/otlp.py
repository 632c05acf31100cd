"""Exports spans to an OpenTelemetry collector over OTLP/HTTP. Imported only with `--otlp-traces-endpoint`.

A background thread sends batches: a slow or unreachable collector does not delay requests; spans beyond the queue's
limit are dropped. OpenTelemetry's environment variables set sampling, batching, headers, certificates and the service
name.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from frontend.observability.request_trace import Attributes
from frontend.observability.trace_context import Origin

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 3.0
WARNING_INTERVAL_S = 60.0
_TRACES_PATH = "/v1/traces"


class RateLimitFilter(logging.Filter):
    """Passes at most one log record per `WARNING_INTERVAL_S`.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = -math.inf

    def filter(self, _: logging.LogRecord) -> bool:
        """Whether the interval has passed."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + WARNING_INTERVAL_S
        return True


_rate_limit = RateLimitFilter()


def exporter(endpoint: str) -> SpanExporter:
    """Creates the exporter.

    Args:
        endpoint: URL of the collector; /v1/traces is appended if it has no path.
    """
    # It logs several errors per batch while its collector is unreachable.
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_rate_limit)
    path = urlsplit(endpoint).path
    return OTLPSpanExporter(endpoint.rstrip("/") + _TRACES_PATH if path in ("", "/") else endpoint)


class OtlpSpans:
    """Creates OpenTelemetry spans; implements `Spans`.

    Args:
        exporter: sends them.
        version: of this service.
    """

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        name = os.environ.get(OTEL_SERVICE_NAME, "chairlift-frontend")
        # The handler at exit would wait for an unreachable collector.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": version}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("chairlift", version)
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, origin: Origin, start_s: float, end_s: float, attributes: Attributes, *, error: str
    ) -> "_RequestSpan":
        """See Spans.request."""
        wall_clock_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            origin.name,
            self._propagator.extract(origin.context, context.Context()),
            SpanKind.SERVER,
            {**attributes, "error.type": error} if error else attributes,
            start_time=wall_clock_ns + int(start_s * 1e9),
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(wall_clock_ns + int(end_s * 1e9))
        return _RequestSpan(self._tracer, span, wall_clock_ns)

    async def close(self) -> None:
        """Sends the remaining spans, within FLUSH_TIMEOUT_S."""
        done = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        done.start()
        await asyncio.to_thread(done.join, FLUSH_TIMEOUT_S)
        if done.is_alive():
            logger.warning("the last traces could not be sent within %g s", FLUSH_TIMEOUT_S)


class _RequestSpan:
    def __init__(self, tracer: trace.Tracer, span: trace.Span, wall_clock_ns: int) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, context.Context())
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self._wall_clock_ns = wall_clock_ns

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """See RequestSpan.phase."""
        start_ns = self._wall_clock_ns + int(start_s * 1e9)
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start_ns)
        span.end(max(start_ns, self._wall_clock_ns + int(end_s * 1e9)))
