"""`python -m bench.retrieval`: what search finds, how fast, and in how much memory."""

import asyncio
import sys

from bench.report import Options, Report, bench_command
from bench.retrieval_quality import measure_quality
from bench.retrieval_speed import measure_ingestion, measure_speed
from gateway.settings import default_cache_dir
from retrieval.embedding import SentenceEmbedder


async def run(options: Options) -> int:
    report = Report("retrieval")
    embedder = SentenceEmbedder()
    try:
        await embedder.start()
        await measure_ingestion(report, embedder, options.quick)
        await measure_quality(report, embedder, default_cache_dir() / "bench", options.quick)
    finally:
        await embedder.aclose()
    await measure_speed(report, options.quick)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(bench_command("retrieval", __doc__, lambda options: asyncio.run(run(options))))
