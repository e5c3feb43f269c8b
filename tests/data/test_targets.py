import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.given_draws import GivenDraws
from transformer_xl.data.targets import Draws, TargetSampler, draw_order, draw_spans, ranks
from transformer_xl.errors import ConfigError

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "xlnet_data"
WINDOW = {"mask_alpha": 6, "mask_beta": 1, "max_gram": 5}
SEP, CLS = 1, 2
PINNED = [0.08943434553617458, 0.8085302834444568, 0.34827549456569584]


def _draws(seed: int) -> Draws:
    return Draws(seed, 0, epoch=0, row=0, step=0)


def _sampler(**changes) -> TargetSampler:
    sizes = {"tgt_len": 32, "reuse_len": 16, "perm_size": 8, "num_predict": 7, "sep": SEP, "cls": CLS}
    return TargetSampler(**{**sizes, "word_starts": np.ones(50, bool), **changes})


@pytest.mark.parametrize("case", json.loads((GOLDENS / "words.json").read_text()))
def test_spans_of_words_are_those_of_the_corrected_loop(case) -> None:
    starts = np.array(case["starts"], bool)[:: -1 if case["backward"] else 1]
    draws = GivenDraws(case["draws"])
    chosen = draw_spans(starts, 10**6, draws, mask_alpha=3, mask_beta=1, max_gram=5, whole_words=True)
    assert np.flatnonzero(chosen[:: -1 if case["backward"] else 1]).tolist() == case["chosen"]
    assert not draws.left


KINDS = st.lists(st.sampled_from(["plain", "target", "functional"]), min_size=1, max_size=12)


@given(KINDS, KINDS, st.integers(0, 1000))
def test_ranks_say_what_the_rules_say(first, second, seed: int) -> None:
    """The rules of the paper and of the authors' code, pair by pair."""
    kinds, reuse_len = [*first, *second], len(first)
    draws = _draws(seed)
    place = np.concatenate([draw_order(len(half), len(half), draws) for half in (first, second)])
    target, functional = (np.array([[kind == name for kind in kinds]]) for name in ("target", "functional"))
    (rank,), (sees,) = ranks(target, functional, place[None], reuse_len=reuse_len)
    for query, key in np.ndindex(len(kinds), len(kinds)):
        halves = query >= reuse_len, key >= reuse_len
        if halves[0] != halves[1]:
            expected = halves[0]
        elif kinds[key] == "plain":
            expected = True
        elif kinds[query] == "plain":
            expected = False
        else:
            expected = place[key] < place[query] or (query == key and kinds[key] == "functional")
        assert (rank[key] < sees[query]) == expected, (query, key)
    assert sees.min() >= 0  # so that a memory of rank -1 is seen by all


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.booleans())


@given(SIZES, st.integers(0, 1000), st.sampled_from(["words", "pieces"]), st.data())
def test_rows_of_any_size(sizes, seed: int, spans, data) -> None:
    perm_size, n_first, n_second, backward = sizes
    reuse_len, tgt_len = perm_size * n_first, perm_size * (n_first + n_second)
    n_target = data.draw(st.integers(1, max(1, tgt_len - 1)))
    source = np.random.default_rng(seed)
    options = {"perm_size": perm_size, "num_predict": n_target, "spans": spans, "word_starts": source.random(20) < 0.7}
    second = n_target * (tgt_len - reuse_len) // tgt_len
    if n_target - second >= reuse_len:
        with pytest.raises(ConfigError, match=rf"model.num_predict \({n_target}\) must be at least 1 and leave tokens to see"):
            _sampler(tgt_len=tgt_len, reuse_len=reuse_len, **options)
        return
    sampler = _sampler(tgt_len=tgt_len, reuse_len=reuse_len, **options)
    ids_BT = source.integers(CLS + 1, 20, (2, tgt_len))
    ids_BT[:, source.integers(reuse_len, tgt_len, 2)], ids_BT[:, -1] = SEP, CLS
    functional_BT = np.isin(ids_BT, [SEP, CLS])
    drawn = sampler.draw(ids_BT, np.array([False, backward]), [_draws(seed), _draws(seed + 1)])
    for row in range(2):
        real = drawn.labels[row] != -100
        targets = drawn.targets[row][real]
        assert n_target - functional_BT[row].sum() <= real.sum() <= n_target == len(real)
        assert (np.diff(targets) > 0).all()
        assert (drawn.labels[row][real] == ids_BT[row][targets]).all()
        assert not functional_BT[row][targets].any()
        assert (drawn.targets[row][~real] == tgt_len - 1).all()
        assert (drawn.rank[row][targets] == drawn.sees[row][targets]).all()  # it does not see itself
        others = np.delete(np.arange(tgt_len), targets)
        assert (drawn.rank[row][others] < drawn.sees[row][others]).all()
        for target in targets.tolist():
            assert (drawn.rank[row] < drawn.sees[row][target]).any()  # it sees something


def test_a_backward_row_is_read_from_its_end() -> None:
    """It has the targets of a forward row with the same draws, in a mirror."""
    ids_BT = np.zeros((1, 40), np.int64)
    ids_BT[0, 20:] = np.arange(3, 23)
    starts = np.ones(50, bool)
    sampler = _sampler(tgt_len=40, reuse_len=20, perm_size=20, num_predict=6, word_starts=starts, spans="pieces")
    forward = sampler.draw(ids_BT, np.array([False]), [_draws(5)])
    backward = sampler.draw(ids_BT, np.array([True]), [_draws(5)])
    for half in (slice(0, 20), slice(20, 40)):
        mirrored = half.start + 19 - (_places(forward, half) - half.start)
        assert _places(backward, half).tolist() == sorted(mirrored.tolist())


def _places(drawn, half: slice) -> np.ndarray:
    places = drawn.targets[0]
    return places[(places >= half.start) & (places < half.stop)]


def test_a_half_has_one_order_unless_told_otherwise() -> None:
    ids_BT = np.random.default_rng(0).integers(3, 50, (1, 32))
    ranks = [
        _sampler(perm_size=perm_size).draw(ids_BT, np.array([False]), [_draws(5)]).rank.tolist() for perm_size in (None, 16, 8)
    ]
    assert ranks[0] == ranks[1] != ranks[2]


def test_draws_never_change() -> None:
    """Written down once; a run that is resumed years later has to draw on."""
    draws = Draws(3, 1, epoch=2, row=5, step=7)
    assert draws.take(3).tolist() == PINNED
    assert [Draws(3, 1, epoch=2, row=5, step=7).take(2000)[i] for i in (0, 1, 2)] == PINNED
    others = [{"epoch": 1, "row": 5, "step": 7}, {"epoch": 2, "row": 4, "step": 7}, {"epoch": 2, "row": 5, "step": 6}]
    firsts = [Draws(3, 1, **key).take(1).item() for key in others] + [Draws(3, 0, epoch=2, row=5, step=7).take(1).item()]
    assert len({*firsts, PINNED[0]}) == 5
    assert Draws(2**70 + 3, 1, epoch=2, row=5, step=7).take(1).item() == PINNED[0]


@given(st.lists(st.integers(1, 1500), max_size=6))
def test_draws_do_not_depend_on_how_many_are_taken_at_once(sizes) -> None:
    draws = _draws(1)
    parts = [draws.take(size) for size in sizes]
    assert np.array_equal(np.concatenate([np.empty(0), *parts]), _draws(1).take(sum(sizes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reuse_len": 32}, r"model.reuse_len \(32\) must be at least 1 and below train.tgt_len \(32\)"),
        ({"perm_size": 5}, r"5 tokens, .* must divide model.reuse_len \(16\) and the rest .* \(16\); use train.tgt_len=32"),
        ({"tgt_len": 33}, r"8 tokens, .* must divide .* \(17\); use train.tgt_len=32"),
        ({"perm_size": 0}, "0 tokens"),
    ],
)
def test_errors(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}[^\n]*$"):
        _sampler(**changes)
