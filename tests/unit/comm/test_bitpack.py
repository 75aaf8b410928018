"""Packing against a naive reading of the layout, bit by bit."""

import pytest
import torch

from robustdist.comm.bitpack import pack, pack_trits, packed_bytes, trit_bytes, unpack, unpack_trits

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000, 4096]
FIELDS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def naive_pack(codes: list[int], bits: int) -> list[int]:
    out = []
    shift = 0
    for width in FIELDS[bits]:
        length = -(-len(codes) * width // 8)
        row = [0] * length
        for place, code in enumerate(codes):
            field = (code >> shift) & ((1 << width) - 1)
            row[place % length] |= field << (width * (place // length))
        out += row
        shift += width
    return out


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_where_the_layout_has_them(bits):
    generator = torch.Generator().manual_seed(bits)
    for size in SIZES:
        codes = torch.randint(0, 2**bits, (size,), dtype=torch.uint8, generator=generator)
        out = torch.full((packed_bytes(size, bits),), 170, dtype=torch.uint8)
        pack(codes.clone(), bits, out)
        assert out.tolist() == naive_pack(codes.tolist(), bits), size
        back = torch.full((size,), 255, dtype=torch.uint8)
        unpack(out, bits, back)
        assert torch.equal(back, codes), size


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_packed_size_is_that_of_the_bits(bits):
    for size in SIZES:
        assert size * bits / 8 <= packed_bytes(size, bits) < size * bits / 8 + len(FIELDS[bits])


def test_trits_are_digits_to_the_base_three():
    for size in SIZES:
        codes = torch.randint(0, 3, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        length = -(-size // 5)
        assert trit_bytes(size) == length
        out = torch.full((length,), 170, dtype=torch.uint8)
        pack_trits(codes, out)
        expected = [0] * length
        for place, code in enumerate(codes.tolist()):
            expected[place % length] += code * 3 ** (place // length)
        assert out.tolist() == expected
        back = torch.full((size,), 255, dtype=torch.uint8)
        unpack_trits(out, back)
        assert torch.equal(back, codes)


def test_all_bytes_of_trits_are_read_right():
    data = torch.arange(243, dtype=torch.uint8)
    out = torch.empty(5 * 243, dtype=torch.uint8)
    unpack_trits(data, out)
    assert out.view(5, 243).T.tolist() == [[value // 3**k % 3 for k in range(5)] for value in range(243)]
