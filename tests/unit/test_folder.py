"""Who owns a data folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval.folder import FolderInUse, owned_folder

HOLD = "import sys,time\nfrom pathlib import Path\nfrom retrieval.folder import owned_folder\n"
HOLD += "with owned_folder(Path(sys.argv[1])):\n    print('mine', flush=True)\n    time.sleep(60)\n"


def test_a_folder_has_one_owner_and_is_free_again_after_it(tmp_path: Path) -> None:
    with owned_folder(tmp_path / "data"):
        with pytest.raises(FolderInUse, match="in use"), owned_folder(tmp_path / "data"):
            pass
        with owned_folder(tmp_path / "other"):
            pass
    with owned_folder(tmp_path / "data"):
        pass


def test_e7_a_killed_owner_leaves_the_folder_free(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"mine\n"
        with pytest.raises(FolderInUse), owned_folder(tmp_path):
            pass
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    with owned_folder(tmp_path):
        pass
