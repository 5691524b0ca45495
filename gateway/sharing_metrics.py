"""What gateways share, as gauges."""

from gateway.metrics import Metrics
from gateway.sharing import Sharing


def sharing_metrics(metrics: Metrics, sharing: Sharing) -> None:
    journal, counts = sharing.journal, sharing.counts
    gauge = metrics.gauge
    gauge("headstart_sharing_degraded", "1 while this gateway hears of no other", lambda: journal.degraded)
    gauge("headstart_sharing_degraded_seconds", "Time spent without the others", lambda: journal.health().degraded_s)
    gauge("headstart_sharing_gateways", "Other gateways heard of in the last seconds", lambda: sharing.gateways)
    gauge("headstart_sharing_foreign_runs", "Other gateways' requests on the way", lambda: sharing.foreign_runs)
    gauge("headstart_sharing_events_applied", "Events of other gateways that counted", lambda: counts.applied)
    gauge("headstart_sharing_events_malformed", "Entries that made no sense", lambda: counts.malformed)
    gauge(
        "headstart_sharing_events_other_epoch",
        "Events of another run of the engine, or of before this gateway knew it",
        lambda: counts.other_epoch,
    )
    gauge("headstart_sharing_events_left_out", "Events beyond the bounds", lambda: counts.left_out)
    gauge("headstart_sharing_entries_written", "Entries written to Redis", lambda: journal.counts.written)
    gauge("headstart_sharing_entries_dropped", "Entries that Redis did not get", lambda: journal.counts.dropped)
    gauge("headstart_sharing_written_bytes", "Size of the entries written", lambda: journal.counts.written_bytes)
    gauge("headstart_sharing_read_bytes", "Size of the entries read", lambda: journal.counts.read_bytes)
