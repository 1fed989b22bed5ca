"""What discovery keeps on disk: found again by the same call of the same code, and by nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.sharding.discovery import book, cache
from autopar.sharding.discovery.book import Discovery
from autopar.sharding.discovery.cache import DiskCache, cache_folder
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.discovery.fingerprint import fingerprint
from tests.autopar.sharding import discovery_ops as ops
from tests.autopar.sharding.test_discovery import call, real

aten = torch.ops.aten
FACTOR = 2.0


def made(rows: int = 8, columns: int = 64) -> Any:
    return call(ops.gated_op, real(rows, columns), real(rows, columns))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that were searched for rules, or whose rules were tried in real sizes."""
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(book, name)

        def counting(made: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(made, *args, **kwargs)

        return counting

    for name in ("find", "confirm"):
        monkeypatch.setattr(book, name, counted(name))
    return seen


def test_a_second_process_reads_what_the_first_found(tmp_path: Path, searches: list[str]) -> None:
    first = Discovery(DiskCache(tmp_path))(made())
    assert searches == ["find", "confirm"]
    assert Discovery(DiskCache(tmp_path))(made()) == Finding(first.rules)
    assert searches == ["find", "confirm"]


def test_other_sizes_of_the_same_kind_are_only_confirmed(tmp_path: Path, searches: list[str]) -> None:
    first = Discovery(DiskCache(tmp_path))(made())
    other = Discovery(DiskCache(tmp_path))(made(16, 24))
    assert searches == ["find", "confirm", "confirm"]
    assert other.rules == first.rules


@pytest.mark.parametrize(
    "other",
    [
        lambda: call(ops.gated_op, real(8, 8), real(8, 8)),  # sizes that are equal
        lambda: call(ops.gated_op, real(8, 64), real(8, 1)),
        lambda: call(ops.gated_op, real(8, 64, 2), real(8, 64, 2)),
        lambda: call(ops.gated_op, real(8, 64).double(), real(8, 64).double()),
    ],
    ids=["equal sizes", "size one", "ranks", "dtypes"],
)
def test_calls_of_another_kind_are_searched_anew(tmp_path: Path, searches: list[str], other: Callable[[], Any]) -> None:
    Discovery(DiskCache(tmp_path))(made())
    Discovery(DiskCache(tmp_path))(other())
    assert searches.count("find") == 2


def test_other_arguments_are_searched_anew(tmp_path: Path, searches: list[str]) -> None:
    for dim in (0, 1):
        Discovery(DiskCache(tmp_path))(call(aten.cumsum.default, real(8, 64), dim))
    assert searches.count("find") == 2


def test_a_finding_that_kept_a_size_is_not_believed_of_another(tmp_path: Path, searches: list[str]) -> None:
    for size in (96, 48):
        Discovery(DiskCache(tmp_path))(call(ops.by_heads_op, real(8, 40, size), 12))
    assert searches.count("find") == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": 1}', "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, searches: list[str], text: str) -> None:
    first = Discovery(DiskCache(tmp_path))(made())
    for path in tmp_path.rglob("*.json"):
        path.write_text(text)
    assert Discovery(DiskCache(tmp_path))(made()).rules == first.rules
    assert searches == ["find", "confirm"] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", 0), ("format", "other"), ("rules", [{"inputs": ["Q"], "outputs": [], "even": False}]), ("key", {}),
     ("rules", [{"inputs": ["S0", "S0"], "outputs": ["S0"], "even": 1}]), ("rules", {"a": 1}), ("why", None)],
)  # fmt: skip
def test_a_file_of_another_version_or_form_is_as_good_as_none(
    tmp_path: Path, searches: list[str], name: str, value: Any
) -> None:
    Discovery(DiskCache(tmp_path))(made())
    for path in tmp_path.rglob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    Discovery(DiskCache(tmp_path))(made())
    assert searches.count("find") == 2


def test_another_version_of_torch_finds_nothing(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Discovery(DiskCache(tmp_path))(made())
    monkeypatch.setattr(torch, "__version__", "99.0")
    Discovery(DiskCache(tmp_path))(made())
    assert searches.count("find") == 2


def test_another_version_of_discovery_finds_nothing(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Discovery(DiskCache(tmp_path))(made())
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    Discovery(DiskCache(tmp_path))(made())
    assert searches.count("find") == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Discovery(DiskCache(tmp_path / "file"))(made()).rules


def test_no_part_of_a_file_is_left_behind(tmp_path: Path) -> None:
    Discovery(DiskCache(tmp_path))(made())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json"}


def test_the_folder_is_the_users_choice(tmp_path: Path) -> None:
    home = Path.home()
    assert cache_folder({"AUTOPAR_CACHE_DIR": "here", "XDG_CACHE_HOME": "/there"}) == Path("here")
    assert cache_folder({"XDG_CACHE_HOME": "/there"}) == Path("/there/autopar")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == home / ".cache" / "autopar"
    assert cache_folder({}) == home / ".cache" / "autopar"


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def test_an_op_is_known_by_its_code_and_by_what_the_code_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops.define(scaled)
    before = fingerprint(op)
    assert before is not None and fingerprint(op) == before
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert fingerprint(op) != before


def test_an_op_with_another_kernel_is_another_op() -> None:
    op = ops.define(lambda_named("rescaled", 2.0))
    before = fingerprint(op)
    torch.library.register_kernel("discovery_test::rescaled", "cpu", lambda x: x * 5)
    assert fingerprint(op) not in (None, before)


def lambda_named(name: str, factor: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x * factor

    function.__name__ = name
    return function


def test_what_a_function_encloses_is_part_of_it() -> None:
    fingerprints = {fingerprint(ops.define(lambda_named(f"enclosed_{index}", index))) for index in range(2)}
    assert len(fingerprints) == 2 and None not in fingerprints


def test_an_op_that_holds_an_object_is_remembered_in_this_process_alone(tmp_path: Path, searches: list[str]) -> None:
    table = [torch.ones(()), object()]

    def holding(x: Tensor) -> Tensor:
        return x * table[0]

    op = ops.define(holding)
    assert fingerprint(op) is None
    memory: dict[object, Finding] = {}
    for _ in range(2):
        assert Discovery(DiskCache(tmp_path), memory=memory)(call(op, real(8, 24))).rules
    assert searches == ["find", "confirm"]
    assert not list(tmp_path.rglob("*.json"))
    torch.library.register_kernel("discovery_test::holding", "cpu", lambda x: x.flip(0))
    assert not any(text.startswith("S0") for text in Discovery(memory=memory)(call(op, real(8, 24))).texts)


def test_ops_of_pytorch_are_known_by_its_version() -> None:
    assert fingerprint(aten.mm.default) == "built in"
