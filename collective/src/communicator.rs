use crate::CollectiveError;

/// One rank's place in the group of one generation, and what the group can do together.
///
/// All ranks must call the same operations in the same order. Operations block; there is no
/// time-out inside them: who notices that a peer is silent raises the [`Fence`](crate::Fence),
/// which ends them all.
///
/// Success speaks for the data, not for the peers: an operation that returns `Ok` has its whole
/// result, even if a peer was lost after it had given its part. Others may have failed in the same
/// operation.
pub trait Communicator {
    /// This rank: an index into the group's members, `0..world_size`.
    fn rank(&self) -> usize;

    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// The generation that this group was built for.
    fn generation(&self) -> u64;

    /// Gives every rank's bytes to every rank, in rank order.
    ///
    /// `mine`: at most [`BLOCK_BYTES_MAX`] bytes; lengths may differ between ranks.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Puts the element-wise sum of all ranks' `src` into every rank's `dst`, and returns every
    /// rank's `header` in rank order. `src` is only read, so that a failed step can be contributed
    /// again.
    ///
    /// `header`: at most [`BLOCK_BYTES_MAX`] bytes; lengths may differ between ranks. `src`, `dst`:
    /// `[len]`, the same `len` on every rank (checked in every frame), f32 in host memory. Traffic
    /// per rank: `2·(n−1)/n · len · 4` bytes each way, and every header once. Every rank gets
    /// bit-identical results: each chunk is summed in one fixed order and copied from there.
    ///
    /// # Errors
    /// [`CollectiveError`]; `dst` then holds unspecified values, and the operation can have
    /// succeeded on other ranks.
    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Replaces `bytes` on every rank with those of rank `root`.
    ///
    /// `bytes`: on `root` at most [`BROADCAST_BYTES_MAX`] bytes; elsewhere what was in it is
    /// dropped. The root returns when the last byte has left it, not when the others have it.
    ///
    /// # Errors
    /// [`CollectiveError`]; away from `root`, `bytes` then holds unspecified values.
    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError>;

    /// Replaces `buf` on every rank with that of rank `root`.
    ///
    /// `buf`: `[len]`, the same `len` on every rank (checked by the receivers in every frame), f32
    /// in host memory. The root returns when the last byte has left it, not when the others have
    /// it.
    ///
    /// # Errors
    /// [`CollectiveError`]; away from `root`, `buf` then holds unspecified values.
    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError>;
}

/// The longest block of one rank in an all-gather, and the longest header in an all-reduce, in
/// bytes: 16 MiB.
pub const BLOCK_BYTES_MAX: usize = 16 << 20;

/// The longest `broadcast_bytes`, in bytes: 1 GiB.
pub const BROADCAST_BYTES_MAX: usize = 1 << 30;
