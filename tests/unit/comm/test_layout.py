"""The flat buffer: every parameter at a block, every element back where it was."""

import math

import torch

from robustdist.comm.layout import Layout

SHAPES = [
    ("a", (40, 30)),
    ("bias", (40,)),
    ("b", (1024,)),
    ("c", (1023,)),
    ("scalar", ()),
    ("none", (0, 5)),
    ("d", (7, 300)),
]


def test_large_ones_begin_at_blocks_and_small_ones_lie_side_by_side():
    layout = Layout(SHAPES, block=512, small=1024)
    assert [(place.name, place.start) for place in layout.places] == [("a", 0), ("b", 1536), ("d", 2560)]
    assert layout.total == 2560 + 5 * 512
    sides = [(place.name, place.start) for place in layout.sides]
    assert sides == [("bias", 0), ("c", 40), ("scalar", 1063), ("none", 1064)]
    assert layout.side_total == 1064


def test_what_is_loaded_is_stored_and_gaps_are_zero():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES}
    layout = Layout(SHAPES)
    flat, side = torch.full((layout.total,), math.nan), torch.full((layout.side_total + 1,), math.nan)
    layout.load(tensors, flat)
    layout.load_sides(tensors, side)
    assert flat.isfinite().all()
    assert side[:-1].isfinite().all()
    assert flat.count_nonzero() == sum(tensors[name].count_nonzero() for name in "abd")
    out = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    layout.store(flat, out)
    layout.store_sides(side, out)
    assert all(torch.equal(out[name], tensors[name]) for name in tensors)


def test_pieces_of_a_range_make_up_the_parameters():
    layout = Layout(SHAPES, block=512, small=1024)
    for step in (1, 500, 512, 700, 5000):
        seen = dict.fromkeys("abd", 0)
        for begin in range(0, layout.total, step):
            for piece in layout.pieces(begin, begin + step):
                assert begin <= piece.start < piece.start + piece.length <= begin + step
                assert piece.offset == seen[piece.name]
                (place,) = (place for place in layout.places if place.name == piece.name)
                assert piece.start == place.start + piece.offset
                seen[piece.name] += piece.length
        assert seen == {"a": 1200, "b": 1024, "d": 2100}


def test_an_empty_bucket_has_no_places():
    layout = Layout([])
    assert (layout.total, layout.side_total, list(layout.pieces(0, 10))) == (0, 0, [])
