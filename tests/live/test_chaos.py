from pathlib import Path

import pytest
from chaos_support import check_exactly_once, run_with_kills

pytest.importorskip("torch")


@pytest.mark.timeout(240)
def test_a_killed_run_resumes_with_nothing_lost_or_doubled(tmp_path: Path) -> None:
    check_exactly_once(run_with_kills(tmp_path, kills=2, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 4))
def test_ten_kills_each(tmp_path: Path, seed: int) -> None:
    check_exactly_once(run_with_kills(tmp_path, kills=10, seed=seed))
