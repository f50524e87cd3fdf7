"""What was tuned on GPUs (H100, H200): sizes, shares and paces of the ring, each with the measurement behind it.

Another GPU may want others. `kvredis bench swap` shows what they do; tests hand in small ones.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one RingTransfer and its kernels use a GPU."""

    slot_bytes: int = 64 * 1024 * 1024
    """Of a staging buffer, at most; less when the KV is smaller."""
    slots: int = 2
    """Staging buffers of each direction. Three of 32 MiB move as much and take a quarter less of the GPU's memory, but
    asking takes twice as long, and that takes the interpreter from the engine: beside vLLM 1.7 ms for 60 MiB of a
    step's layer (profiled)."""
    linked_factor: int = 4
    """A buffer is so many times as long where the far end is another GPU's memory: NVLink moves 64 MiB in 0.2 ms, and a
    chunk's checksum takes 0.5 ms, which is found beside those of the other chunks in the buffer. 60 chunks of 32 MiB
    were stored in 20.2, 11.2 and 6.9 ms and loaded in 11.7, 7.4 and 6.4 with 1, 2 and 4, without checksums in 5.5 and
    5.7, and copied alone in 5.3 (two H200s, medians of 9)."""
    head_parts: int = 48
    """Of more parts than that, so many go first: 512 take 0.2 ms to plan, in which nothing was copied. In three jobs it
    takes longer than in two (3b in chunks of 16, by 1 % in turns)."""
    sum_rows: int = 4096
    """Chunks whose checksums are found at a time, both directions together; 64 bytes each."""

    first_out_share: int = 8
    """The first buffer of a store that finds the ring at rest is filled to an eighth: nothing is copied before it is
    gathered. Copying as much takes as long as planning and gathering the next."""
    first_in_share: int = 3
    """A load's to a third: it waits for no kernel, only until its copies are listed, but the next one's take 0.3 ms to
    be asked for, in which 16 MiB are copied. Of 9 MiB, one chunk of 3b, that left 0.1 ms without a copy: its 302 MB
    came at 94.5 % of the link, with a third at 95.5, with half at 95.7, where 7b lost as much (medians of 15 and more
    in turns, two H200s)."""
    last_in_share: int = 8
    """Where checksums are waited for, a load's last buffers are filled by halves of what is left, down to an eighth. Of
    a chunk one part is summed up behind the other, 32 MiB in 0.5 ms: beside the copies, if it comes in pieces. To
    enqueue a piece takes twice as long as to copy 8 MiB, so only few are that small."""

    pace_bytes_per_s: float = 100e9
    """While all buffers are under way chunks are enqueued no faster, twice as fast as PCIe 5 moves them: a thread that
    launches an engine's kernels from Python gets no turn of the interpreter beside one that calls the runtime again and
    again. The first layer of an eager 8k prefill ended 1.5 to 2.3 ms later beside a load of 17 buffers at once, 0.5 so
    (H200). Layers, and a load's last buffers that are filled to less and less, are not kept waiting."""
    paced_bytes: int = 512 * 1024 * 1024
    """Of a job that has pauses, at least. A smaller one takes the interpreter for less than a millisecond, and ends
    later where a thread wakes late: 3b's 302 MB took 0.2 ms longer with pauses in two of three pairs (H200)."""
    paced_parts: int = 48
    """Of a job that has pauses, at most. To list more is slow by itself, and slower behind a pause: 3b in chunks of 16
    tokens moved 7 % slower (H200). More go in two (head_parts), each of which would count for itself."""

    stream_priority: int = -1
    """Kernels of the ring are short and few; behind those of a prefill they would keep the copy engine waiting."""
    quiet_factor: float = 1.2
    """Times as long as by themselves an engine's kernels may take beside a quiet stream (streams.py); measured 1.0, and
    1.5 to 1.8."""
    quiet_tries: int = 4
    """Streams that are tried before the quietest of them is taken."""

    move_tile_bytes: int = 32 * 1024
    """64 MiB are gathered in 37.6 us and scattered in 38.1, back to back; by 16 KiB in 38.5 and 38.6 (H200)."""
    kernel_warps: int = 8
    """Of each program that moves, or folds for checksums."""
    fold_tile_blocks: int = 16
    """Blocks of 1 KiB that one program folds."""
    chain_unrolled: int = 64
    """Blocks whose sums are asked for at once by the program that scrambles. The compiler asks for a dozen, and waits
    for each through the whole L2: so one load for each sector of 32 bytes brings the next ones near meanwhile. What
    that adds up to is put where it is never read, or it would be left out. 32 MiB in 0.48 ms instead of 0.65."""


TUNING: Final = Tuning()
