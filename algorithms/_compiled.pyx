# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The inner loops of `averages`, `requantise`, `bits` and `indices`, compiled: the same bits as their numpy.

All of them let other threads run. What is read or written by position is checked; callers see to the rest.
"""

from libc.math cimport frexp, ldexp
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef fused Quantised:
    int8_t
    int16_t

ctypedef fused Integer:
    int8_t
    uint8_t
    int16_t
    uint16_t

cdef double TO_EVEN = 6755399441055744.0
"""1.5 * 2^52: the sum with a number below 2^51 has no bits left for a fraction."""


cdef inline double _rint(double value) noexcept nogil:
    return (value + TO_EVEN) - TO_EVEN


def fill_keys(
    int64_t[:, ::1] keys,
    int64_t column,
    const int64_t[::1] rows,
    const uint16_t[:, ::1] indices,
    const Quantised[:, ::1] values,
    const double[::1] scales,
    int32_t bias,
):
    """Writes the keys of one site's chunks (n, k) into `keys` (m, w): from `column` on, those of chunk i in row
    `rows[i]`."""
    cdef int64_t chunk, place
    cdef int32_t integer
    cdef double scale
    cdef int64_t* mine
    if not (
        rows.shape[0] == indices.shape[0] == values.shape[0] == scales.shape[0] and indices.shape[1] == values.shape[1]
    ):
        raise ValueError("a contribution has not as many indices, values and scales as chunks")
    if column + indices.shape[1] > keys.shape[1]:
        raise IndexError("keys are too narrow")
    for chunk in range(rows.shape[0]):
        if not 0 <= rows[chunk] < keys.shape[0]:
            raise IndexError(f"keys have no row {rows[chunk]}")
    with nogil:
        for chunk in range(rows.shape[0]):
            scale = scales[chunk]
            mine = &keys[rows[chunk], 0] + column
            for place in range(indices.shape[1]):
                integer = bias + <int32_t>_rint(values[chunk, place] * scale)
                mine[place] = (<int64_t>indices[chunk, place] << 32) + integer


def average_equals(
    const int64_t[:, ::1] keys,
    int64_t bias,
    int64_t divisor,
    bint median,
    uint16_t[:, ::1] indices,
    int32_t[:, ::1] values,
):
    """Indices and averages of sorted keys (m, w): of equal indices in a row the first has it, and the others 0.

    `divisor` 0: the mean, or median, of those that are there.
    """
    cdef int64_t row, first, end, place, total
    cdef int64_t index
    with nogil:
        for row in range(keys.shape[0]):
            first = 0
            while first < keys.shape[1]:
                index = keys[row, first] >> 32
                total = _integer(keys[row, first], bias)
                indices[row, first] = <uint16_t>index
                end = first + 1
                while end < keys.shape[1] and keys[row, end] >> 32 == index:
                    total += _integer(keys[row, end], bias)
                    indices[row, end] = <uint16_t>index
                    values[row, end] = 0
                    end += 1
                if divisor:
                    total = <int64_t>_rint(total / <double>divisor)
                elif median:
                    total = _integer(keys[row, (first + end - 1) // 2], bias)
                    total += _integer(keys[row, (first + end) // 2], bias)
                    total = <int64_t>_rint(total / 2.0)
                elif end - first > 1:
                    total = <int64_t>_rint(total / <double>(end - first))
                values[row, first] = <int32_t>total
                first = end


cdef inline int64_t _integer(int64_t key, int64_t bias) noexcept nogil:
    return <int64_t><uint32_t>key - bias


def requantise(
    const uint16_t[:, ::1] indices,
    const int32_t[:, ::1] values,
    const int32_t[::1] exponents,
    const int32_t[::1] most,
    int64_t[::1] counts,
    uint16_t[::1] kept,
    int8_t[::1] rounded,
    int16_t[::1] shifted,
    uint8_t[::1] bits,
):
    """What stays of (m, w) values after they are rounded, one after another, and how many that are.

    4 bits per value of rows with at most `most[0]` non-zeros, 6 with at most `most[1]`, or 8. `counts`, `shifted` and
    `bits` are (m,), `kept` and `rounded` (m * w,).
    """
    cdef int64_t row, column, width, written = 0
    cdef int32_t value, peak, nonzeros
    cdef int shift
    cdef int8_t small
    cdef double scale
    with nogil:
        for row in range(values.shape[0]):
            peak = 0
            nonzeros = 0
            for column in range(values.shape[1]):
                value = values[row, column]
                value = value if value >= 0 else -value
                nonzeros += value != 0
                peak = value if value > peak else peak
            width = 4 if nonzeros <= most[0] else 6 if nonzeros <= most[1] else 8
            frexp(peak, &shift)
            shift = shift - <int>width + 1 if shift >= width else 0
            shift += _rint(ldexp(peak, -shift)) >= 1 << (width - 1)
            scale = ldexp(1.0, -shift)
            counts[row] = -written
            for column in range(values.shape[1]):
                small = <int8_t><int32_t>_rint(values[row, column] * scale)
                kept[written] = indices[row, column]
                rounded[written] = small
                written += small != 0
            counts[row] += written
            shifted[row] = <int16_t>(exponents[row] + shift) if peak else 0
            bits[row] = <uint8_t>width
    return written


def pack_bits(const Integer[::1] values, int width, uint8_t[::1] packed):
    """As `bits.pack_bits`, into `packed` (packed_size,)."""
    cdef uint64_t word = 0, mask = (<uint64_t>1 << width) - 1
    cdef int64_t place = 0, byte = 0
    cdef int lane, filled = 0
    with nogil:
        if width <= 8:  # eight values at a time, and zeros up to the eighth byte, which the next ones write over
            while place + 8 <= values.shape[0] and byte + 8 <= packed.shape[0]:
                word = 0
                for lane in range(8):
                    word |= (<uint64_t>values[place + lane] & mask) << (lane * width)
                for lane in range(8):
                    packed[byte + lane] = <uint8_t>(word >> (8 * lane))
                place += 8
                byte += width
            word = 0
        for place in range(place, values.shape[0]):
            word |= (<uint64_t>values[place] & mask) << filled
            filled += width
            while filled >= 8:
                packed[byte] = <uint8_t>word
                byte += 1
                word >>= 8
                filled -= 8
        if filled:
            packed[byte] = <uint8_t>word


def unpack_bits(const uint8_t[::1] data, int width, Integer[::1] values):
    """As `bits.unpack_bits`, of data (packed_size,)."""
    cdef uint32_t word, mask = (<uint32_t>1 << width) - 1
    cdef int64_t place, byte, bit = 0, whole = 0
    if data.shape[0] >= 4:  # so many begin where there are four bytes to read
        whole = min(values.shape[0], ((data.shape[0] - 4) * 8 + 7) // width + 1)
    with nogil:
        for place in range(whole):
            byte = bit >> 3
            word = data[byte] | <uint32_t>data[byte + 1] << 8 | <uint32_t>data[byte + 2] << 16
            word |= <uint32_t>data[byte + 3] << 24
            values[place] = <Integer>(word >> (bit & 7) & mask)
            bit += width
        for place in range(whole, values.shape[0]):
            word = 0
            for byte in range((bit + width - 1) >> 3, (bit >> 3) - 1, -1):
                word = word << 8 | data[byte]
            values[place] = <Integer>(word >> (bit & 7) & mask)
            bit += width


def pack_high(const uint16_t[::1] indices, const int64_t[::1] counts, int low, int64_t zeros, uint8_t[::1] packed):
    """The records of indices without their `low` bits, into zeros (packed_size of all bits,)."""
    cdef int64_t chunk, number, bit, total = 0, first = 0, place = 0, at = 0
    cdef uint64_t word = 0
    for chunk in range(counts.shape[0]):
        if not 0 <= counts[chunk] <= indices.shape[0] - total:
            raise ValueError(f"{indices.shape[0]} indices, but chunk {chunk} has {counts[chunk]} after {total} others")
        total += counts[chunk]
    if total != indices.shape[0]:
        raise ValueError(f"{indices.shape[0]} indices, but counts are {total} together")
    with nogil:
        for chunk in range(counts.shape[0]):
            for number in range(counts[chunk]):
                bit = first + number + (indices[place] >> low)
                if bit >> 6 != at:
                    _store(packed, at, word)
                    at = bit >> 6
                    word = 0
                word |= <uint64_t>1 << (bit & 63)
                place += 1
            first += counts[chunk] + zeros
        _store(packed, at, word)


cdef inline void _store(uint8_t[::1] packed, int64_t at, uint64_t word) noexcept nogil:
    """The word that begins `8 * at` bytes into `packed`, as far as that goes."""
    cdef int64_t lane, byte = 8 * at
    if byte + 8 <= packed.shape[0]:
        for lane in range(8):
            packed[byte + lane] = <uint8_t>(word >> (8 * lane))
    else:
        for lane in range(packed.shape[0] - byte):
            packed[byte + lane] = <uint8_t>(word >> (8 * lane))
