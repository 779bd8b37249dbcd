//! The collective operations that each kind of group implements, and their limits.

use crate::CollectiveError;

/// Handle of one rank to the group of one generation, with the collective operations of the group.
///
/// All ranks must call the same operations in the same order. Operations block and have no internal
/// timeout: the caller that detects a silent peer raises the [`Fence`](crate::Fence), which aborts
/// all operations of the group.
///
/// `Ok` is a statement about the data, not about the peers: the result is complete, even if a peer
/// was lost after it had contributed. The same operation may have failed on other ranks.
pub trait Communicator {
    /// Rank of this member: an index into the group's members, `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// Generation of the membership that this group was built for.
    fn generation(&self) -> u64;

    /// Gathers the bytes of every rank on every rank, in rank order.
    ///
    /// `block`: at most [`BLOCK_BYTES_MAX`] bytes; lengths may differ between ranks.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn all_gather(&mut self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Writes the element-wise sum of all ranks' `src` to every rank's `dst`, and returns every
    /// rank's `header` in rank order. `src` is only read, so a failed step can be retried with the
    /// same contribution.
    ///
    /// `header`: at most [`BLOCK_BYTES_MAX`] bytes; lengths may differ between ranks. `src`, `dst`:
    /// `[len]`, the same `len` on every rank (checked in every frame), f32 in host memory. Traffic
    /// per rank: `2·(n−1)/n · len · 4` bytes in each direction, and every header once. Every rank
    /// gets bit-identical results: each chunk is reduced in one fixed order and copied from there.
    ///
    /// # Errors
    /// [`CollectiveError`]; `dst` then holds unspecified values. The operation may have succeeded
    /// on other ranks.
    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Gives every rank its element of `send`, and replaces `receive` with the payloads that all
    /// ranks give to this one, in rank order. A receiver needs to know no length beforehand.
    ///
    /// `send`: one payload per rank, of at most [`PAYLOAD_BYTES_MAX`] bytes; lengths may differ,
    /// and the payload for this rank itself is copied. `receive`: its allocations are reused.
    /// Payloads are bytes without an alignment; numbers are read with `from_le_bytes`. Traffic per
    /// rank: what it gives to other ranks, and what it gets from them, once each.
    ///
    /// # Errors
    /// [`CollectiveError`]; `receive` then holds unspecified values. The operation may have
    /// succeeded on other ranks.
    fn exchange(
        &mut self,
        send: &[&[u8]],
        receive: &mut Vec<Vec<u8>>,
    ) -> Result<(), CollectiveError>;

    /// Replaces `bytes` on every rank with those of rank `root`.
    ///
    /// `bytes`: on `root` at most [`BROADCAST_BYTES_MAX`] bytes; on other ranks the previous
    /// content is discarded. The root returns when the last byte is handed to the network, not when
    /// the other ranks have received it.
    ///
    /// # Errors
    /// [`CollectiveError`]; on ranks other than `root`, `bytes` then holds unspecified values.
    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError>;

    /// Replaces `buf` on every rank with that of rank `root`.
    ///
    /// `buf`: `[len]`, the same `len` on every rank (checked by the receivers in every frame), f32
    /// in host memory. The root returns when the last byte is handed to the network, not when the
    /// other ranks have received it.
    ///
    /// # Errors
    /// [`CollectiveError`]; on ranks other than `root`, `buf` then holds unspecified values.
    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError>;
}

/// Largest block of one rank in an all-gather, and largest header in an all-reduce, in bytes: 16
/// MiB.
pub const BLOCK_BYTES_MAX: usize = 16 << 20;

/// Largest `broadcast_bytes`, in bytes: 1 GiB.
pub const BROADCAST_BYTES_MAX: usize = 1 << 30;

/// Largest payload from one rank to another in an exchange, in bytes: 1 GiB.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 30;

/// Checks the payloads of an exchange, one for each of `world` ranks.
///
/// # Errors
/// [`CollectiveError::Invalid`].
pub(crate) fn check_payloads(send: &[&[u8]], world: usize) -> Result<(), CollectiveError> {
    let too_long = send.iter().position(|payload| payload.len() > PAYLOAD_BYTES_MAX);
    let reason = match too_long {
        Some(rank) => format!(
            "a payload of {} bytes for rank {rank}; the limit is {PAYLOAD_BYTES_MAX}",
            send[rank].len()
        ),
        None if send.len() != world => {
            format!("{} payloads in a group of {world}; each rank gets one", send.len())
        }
        None => return Ok(()),
    };
    Err(CollectiveError::Invalid(reason))
}
