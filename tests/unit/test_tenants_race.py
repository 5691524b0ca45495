"""The salt secret when several gateways start on one data folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from gateway.tenants import load_salt_secret


def test_f5_gateways_that_start_at_once_all_get_a_whole_secret(tmp_path: Path) -> None:
    for attempt in range(20):
        barrier = Barrier(8)

        def start(folder: Path = tmp_path / str(attempt), together: Barrier = barrier) -> bytes:
            together.wait()
            return load_salt_secret(folder, "")

        with ThreadPoolExecutor(8) as pool:
            found = [future.result() for future in [pool.submit(start) for _ in range(8)]]
        assert {len(secret) for secret in found} == {64}
        assert [path.name for path in (tmp_path / str(attempt)).iterdir()] == ["salt-secret"]
