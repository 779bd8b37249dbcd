//! The sums of a step's gradients, of which each rank gets those of the chunks that it holds, or is
//! about to hold.
//!
//! ```text
//!   links:   parts of the sums ──► owner of the chunk ── sum ──► its other holders
//!   memory, or one sum per host:   all-reduce, of which a rank keeps what it needs
//! ```

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;

use elasticdl_collective::{CollectiveError, Communicator};
use elasticdl_tables::{ChunkLayout, ChunkSums, Chunks};
use xxhash_rust::xxh3::Xxh3Default;

use crate::buckets::{Bucket, BucketSums, Cut};
use crate::machine::Group;
use crate::optimizer::squares;
use crate::session::{InvalidData, header};
use crate::tensors::is_finite;
use crate::trainer::stopped::{Stopped, decode_all};

/// The sums of the step, as far as they are there.
#[derive(Debug)]
pub(super) struct StepSums {
    layout: ChunkLayout,
    /// The ranks that need the sum of each chunk, first its owner.
    receivers: Vec<Vec<usize>>,
    /// Number of parameters of a bucket, which has whole chunks.
    bucket_len: usize,
    /// Of the chunks that this rank needs.
    sums: BTreeMap<u32, Vec<f32>>,
    /// Whether they are finite.
    are_finite: bool,
    /// Whether this rank has not seen the sums of all chunks, as their owners have summed some. A
    /// group may begin to share memory in a step.
    is_at_owners: bool,
    /// Sums of the squares of the chunks whose sums this rank has seen, if the update needs the
    /// norm of all, and the first parameter that counts in it.
    squares: Option<(Vec<f64>, usize)>,
    /// The sum of a bucket, or what this rank gives to the sums of others.
    bucket: Vec<f32>,
    /// What others give to the sums of this rank.
    given: Vec<f32>,
    /// The sums of the chunks that this rank owns, and what it sends of them to each rank.
    own: Vec<f32>,
    outgoing: Vec<Vec<f32>>,
}

impl BucketSums for StepSums {
    fn cut(&self) -> Cut {
        Cut::FromStart(self.bucket_len)
    }

    fn sum(
        &mut self,
        ring: &mut (impl Communicator + ?Sized),
        header: &[u8],
        (start, part): Bucket<'_>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let chunks = self.layout.chunks_in(start..start + part.len());
        if ring.sums_pairwise() {
            self.is_at_owners = true;
            return self.sum_at_owners(ring, header, (start, part), chunks);
        }
        self.bucket.resize(part.len(), 0.0);
        let headers = if ring.world_size() > 1 {
            ring.all_reduce(header, part, &mut self.bucket)?
        } else {
            self.bucket.copy_from_slice(part);
            vec![header.to_vec()]
        };
        let bucket = mem::take(&mut self.bucket);
        for chunk in chunks {
            let range = self.layout.range(chunk);
            self.keep(chunk, &bucket[range.start - start..range.end - start]);
        }
        self.bucket = bucket;
        Ok(headers)
    }
}

impl StepSums {
    /// `bucket_len`: of the model, if it has buckets. `clipped_from`: the update needs the norm of
    /// the sum from this parameter on.
    pub(super) fn new(
        layout: ChunkLayout,
        bucket_len: Option<usize>,
        clipped_from: Option<usize>,
    ) -> Self {
        let bucket_len = bucket_len.unwrap_or(BUCKET_LEN_MAX).min(BUCKET_LEN_MAX);
        Self {
            layout,
            receivers: Vec::new(),
            bucket_len: bucket_len.max(1).next_multiple_of(layout.chunk_len),
            sums: BTreeMap::new(),
            are_finite: true,
            is_at_owners: false,
            squares: clipped_from.map(|first| (vec![0.0; layout.chunks() as usize], first)),
            bucket: Vec::new(),
            given: Vec::new(),
            own: Vec::new(),
            outgoing: Vec::new(),
        }
    }

    /// The sums that follow are those of a step.
    pub(super) fn begin(&mut self, chunks: &Chunks) {
        let Self { layout, receivers, sums, .. } = self;
        (self.are_finite, self.is_at_owners) = (true, false);
        *receivers = (0..layout.chunks()).map(|chunk| chunks.receivers(chunk)).collect();
        let mut spare = mem::take(sums);
        for chunk in (0..layout.chunks()).filter(|&chunk| chunks.needs_sum(chunk)) {
            let zeros = || vec![0.0; layout.range(chunk).len()];
            sums.insert(chunk, spare.remove(&chunk).unwrap_or_else(zeros));
        }
    }

    /// Whether the sums that this rank needs are finite.
    pub(super) fn are_finite(&self) -> bool {
        self.are_finite
    }

    /// Digest of the sums that this rank needs.
    pub(super) fn digest(&self) -> u64 {
        let mut digest = Xxh3Default::new();
        self.sums.values().for_each(|sum| digest.update(bytemuck::cast_slice(sum)));
        digest.digest()
    }

    /// What this rank needs of the sum, once all buckets are summed. A collective operation of the
    /// group.
    pub(super) fn take(&mut self, group: &mut dyn Group) -> Result<ChunkSums, Stopped> {
        let norm = self.norm(group)?;
        Ok(ChunkSums { sums: mem::take(&mut self.sums), norm })
    }

    /// Uses the memory of these sums for those of a later step.
    pub(super) fn reuse(&mut self, sums: ChunkSums) {
        self.sums = sums.sums;
    }

    /// As [`sum`](BucketSums::sum), without what the all-reduce gives to ranks that don't need it:
    /// the owner of each chunk sums it, and gives the sum to the other holders.
    fn sum_at_owners(
        &mut self,
        ring: &mut (impl Communicator + ?Sized),
        header: &[u8],
        (start, part): Bucket<'_>,
        chunks: Range<u32>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let (world, me) = (ring.world_size(), ring.rank());
        let mut of_owners: Vec<Vec<u32>> = vec![Vec::new(); world];
        for chunk in chunks {
            of_owners[self.receivers[chunk as usize][0]].push(chunk);
        }
        let layout = self.layout;
        let len = |chunks: &[u32]| chunks.iter().map(|&chunk| layout.range(chunk).len()).sum();
        let (mut bucket, mut given) = (mem::take(&mut self.bucket), mem::take(&mut self.given));
        bucket.clear();
        for &chunk in of_owners.iter().flatten() {
            let range = layout.range(chunk);
            bucket.extend_from_slice(&part[range.start - start..range.end - start]);
        }
        let (mut rest, mut src) = (&bucket[..], Vec::with_capacity(world));
        for chunks in &of_owners {
            let (of_owner, others) = rest.split_at(len(chunks));
            src.push(of_owner);
            rest = others;
        }
        let (mut sums, mut outgoing) = (mem::take(&mut self.own), mem::take(&mut self.outgoing));
        sums.resize(len(&of_owners[me]), 0.0);
        ring.reduce_scatter(&src, &mut sums, &mut given)?;
        outgoing.resize(world, Vec::new());
        outgoing.iter_mut().for_each(Vec::clear);
        let mut rest = &sums[..];
        for &chunk in &of_owners[me] {
            let (sum, others) = rest.split_at(layout.range(chunk).len());
            rest = others;
            for &rank in self.receivers[chunk as usize].iter().filter(|&&rank| rank != me) {
                outgoing[rank].extend_from_slice(sum);
            }
            self.keep(chunk, sum);
        }
        of_owners[me].clear();
        for chunks in &mut of_owners {
            chunks.retain(|&chunk| self.receivers[chunk as usize].contains(&me));
        }
        let send: Vec<&[u8]> = outgoing.iter().map(|sums| bytemuck::cast_slice(sums)).collect();
        given.resize(of_owners.iter().map(|chunks| len(chunks)).sum(), 0.0);
        let mut receive = parts(&mut given, of_owners.iter().map(|chunks| len(chunks)));
        ring.exchange_into(&send, &mut receive)?;
        let mut rest = &given[..];
        for &chunk in of_owners.iter().flatten() {
            let (sum, others) = rest.split_at(layout.range(chunk).len());
            rest = others;
            self.keep(chunk, sum);
        }
        (self.bucket, self.given, self.own, self.outgoing) = (bucket, given, sums, outgoing);
        ring.all_gather(header)
    }

    /// Keeps what this rank needs of the sum of a chunk.
    fn keep(&mut self, chunk: u32, sum: &[f32]) {
        if let Some(into) = self.sums.get_mut(&chunk) {
            into.copy_from_slice(sum);
            self.are_finite &= is_finite(sum);
        }
        if let Some((of_chunks, first)) = &mut self.squares {
            let before = first.saturating_sub(self.layout.range(chunk).start).min(sum.len());
            of_chunks[chunk as usize] = squares(&sum[before..]);
        }
    }

    /// Euclidean norm of the sum of all chunks, if the update needs it.
    fn norm(&mut self, group: &mut dyn Group) -> Result<Option<f64>, Stopped> {
        let Some((squares, _)) = &mut self.squares else { return Ok(None) };
        if self.is_at_owners {
            let all: Vec<Vec<f64>> = decode_all(group.all_gather(&header::encode(&*squares))?)?;
            for (chunk, receivers) in self.receivers.iter().enumerate() {
                let of_owner = all[receivers[0]].get(chunk);
                squares[chunk] = *of_owner.ok_or(InvalidData("the squares of a gradient"))?;
            }
        }
        Ok(Some(squares.iter().sum::<f64>().sqrt()))
    }
}

/// Cuts the beginning of `memory` into parts of these lengths.
pub(super) fn parts<T: bytemuck::Pod>(
    mut memory: &mut [T],
    lens: impl Iterator<Item = usize>,
) -> Vec<&mut [u8]> {
    let part =
        |len| bytemuck::cast_slice_mut(memory.split_off_mut(..len).expect("it has all parts"));
    lens.map(part).collect()
}

/// Number of parameters of a bucket, at most, unless a chunk has more: 16 MiB.
const BUCKET_LEN_MAX: usize = 4 << 20;
