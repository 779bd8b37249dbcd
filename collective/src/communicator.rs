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
    /// `block`: at most [`BLOCK_BYTES_MAX`] bytes, and in groups of more than 255 ranks at most
    /// 4 GiB divided by the ranks; lengths may differ between ranks.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn all_gather(&mut self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Writes the element-wise sum of all ranks' `src` to every rank's `dst`, and returns every
    /// rank's `header` in rank order. `src` is only read, so a failed step can be retried with the
    /// same contribution.
    ///
    /// `header`: as the block of an [all-gather](Self::all_gather). `src`, `dst`: `[len]`, the same
    /// `len` on every rank (checked in every frame), f32 in host memory. Traffic per rank:
    /// `2·(n−1)/n · len · 4` bytes in each direction, in large groups up to 1.5 times that for
    /// short buffers, and every header once. Every rank gets bit-identical results: each chunk is
    /// reduced in one fixed order and copied from there.
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

    /// As [`exchange`](Self::exchange), of payloads whose lengths both ends know: they are received
    /// where they belong. If each rank gives all ranks the same payload, this is an all-gather.
    ///
    /// `receive`: one slice per rank, as long as what that rank gives to this one (checked before
    /// anything is received).
    ///
    /// # Errors
    /// [`CollectiveError`]; `receive` then holds unspecified values. The operation may have
    /// succeeded on other ranks.
    fn exchange_into(
        &mut self,
        send: &[&[u8]],
        receive: &mut [&mut [u8]],
    ) -> Result<(), CollectiveError> {
        check_receivers(self.rank(), send, receive, self.world_size())?;
        let mut payloads = Vec::new();
        self.exchange(send, &mut payloads)?;
        for (rank, (payload, into)) in payloads.iter().zip(receive).enumerate() {
            check_length(payload.len(), into.len()).map_err(|reason| {
                CollectiveError::Protocol { rank, member: rank as u64, reason }
            })?;
            into.copy_from_slice(payload);
        }
        Ok(())
    }

    /// Writes to `dst` the element-wise sum of what all ranks give to this one, in rank order:
    /// ranks that get the same contributions get the same bits.
    ///
    /// `src`: one slice per rank, as long as the `dst` of that rank, f32 in host memory; it is only
    /// read. `scratch`: its allocation is reused; afterwards as long as what the others have given.
    /// Traffic per rank as for an [exchange](Self::exchange).
    ///
    /// # Errors
    /// [`CollectiveError`]; `dst` is then unchanged. The operation may have succeeded on other
    /// ranks.
    fn reduce_scatter(
        &mut self,
        src: &[&[f32]],
        dst: &mut [f32],
        scratch: &mut Vec<f32>,
    ) -> Result<(), CollectiveError> {
        let (rank, world, len) = (self.rank(), self.world_size(), dst.len());
        let mut send: Vec<&[u8]> = src.iter().map(|part| bytemuck::cast_slice(part)).collect();
        check_payloads(&send, world)?;
        let own = src[rank];
        if own.len() != len {
            let reason = format!("a source of {} elements for a sum of {len}", own.len());
            return Err(CollectiveError::Invalid(reason));
        }
        scratch.resize(len * (world - 1), 0.0);
        let mut rest = &mut scratch[..];
        let mut receive: Vec<&mut [u8]> = Vec::with_capacity(world);
        for other in 0..world {
            // What this rank gives to itself stays where it is.
            let (part, others) = rest.split_at_mut(if other == rank { 0 } else { len });
            receive.push(bytemuck::cast_slice_mut(part));
            rest = others;
        }
        send[rank] = &[];
        self.exchange_into(&send, &mut receive)?;
        let (before, after) = scratch.split_at(rank * len);
        let parts = before.chunks(len.max(1)).chain([own]).chain(after.chunks(len.max(1)));
        for (other, part) in parts.enumerate() {
            match other {
                0 => dst.copy_from_slice(part),
                _ => dst.iter_mut().zip(part).for_each(|(sum, part)| *sum += part),
            }
        }
        Ok(())
    }

    /// Whether ranks that each need a part of a sum get it with less traffic by
    /// [`reduce_scatter`](Self::reduce_scatter) than by [`all_reduce`](Self::all_reduce). All ranks
    /// find the same, between the same two operations.
    fn sums_pairwise(&self) -> bool {
        self.world_size() > 2
    }

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

/// As [`check_payloads`], also where payloads are received by this `rank`.
///
/// # Errors
/// [`CollectiveError::Invalid`].
pub(crate) fn check_receivers(
    rank: usize,
    send: &[&[u8]],
    receive: &[&mut [u8]],
    world: usize,
) -> Result<(), CollectiveError> {
    check_payloads(send, world)?;
    let reason = match receive.get(rank) {
        Some(own) if receive.len() == world && own.len() == send[rank].len() => return Ok(()),
        Some(own) if receive.len() == world => {
            format!("{} bytes for this rank itself, which expects {}", send[rank].len(), own.len())
        }
        _ => format!("{} buffers in a group of {world}; each rank fills one", receive.len()),
    };
    Err(CollectiveError::Invalid(reason))
}

/// Checks that a payload is as long as what it is for.
///
/// # Errors
/// A message with both lengths.
pub(crate) fn check_length(bytes: usize, expected: usize) -> Result<(), String> {
    if bytes == expected {
        return Ok(());
    }
    Err(format!("expected a payload of {expected} bytes, got {bytes}"))
}
