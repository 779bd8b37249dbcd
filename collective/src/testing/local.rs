//! A group of threads of one process, without sockets: the reference for tests of the other groups.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::communicator::check_payloads;
use crate::{BLOCK_BYTES_MAX, BROADCAST_BYTES_MAX, CollectiveError, Communicator};

/// One rank of an in-process group: threads that synchronize under a lock. For tests of code that
/// uses a [`Communicator`], without sockets; slow, and simple enough to be a reference for other
/// backends.
///
/// The rank that enters an operation last completes it for all ranks.
#[derive(Debug)]
pub struct LocalRank {
    group: Arc<Barrier>,
    rank: usize,
    /// Sequence number of the next operation.
    sequence: u64,
    /// Lengths of its sums.
    summed: Vec<usize>,
}

/// Aborts the operations of a [`LocalRank`] from another thread.
#[derive(Clone, Debug)]
pub struct LocalFence {
    group: Arc<Barrier>,
    rank: usize,
}

impl LocalRank {
    /// Creates all ranks of a group of `world` ranks, at least 1, in rank order.
    #[must_use]
    pub fn group(world: usize, generation: u64) -> Vec<Self> {
        assert!(world > 0, "a group has at least one rank");
        let state = State { operations: BTreeMap::new(), ends: vec![None; world] };
        let group =
            Arc::new(Barrier { generation, state: Mutex::new(state), changed: Condvar::new() });
        let of_rank = |rank| Self { group: group.clone(), rank, sequence: 0, summed: Vec::new() };
        (0..world).map(of_rank).collect()
    }

    /// Lengths of the sums that this rank has taken part in, in order.
    #[must_use]
    pub fn summed(&self) -> &[usize] {
        &self.summed
    }

    /// Fence that aborts this rank's operations.
    #[must_use]
    pub fn fence(&self) -> LocalFence {
        LocalFence { group: self.group.clone(), rank: self.rank }
    }

    /// Waits for all ranks in the next operation, and returns the contributions of all ranks in
    /// rank order.
    fn meet(&mut self, own: Part) -> Result<Arc<Vec<Part>>, CollectiveError> {
        let sequence = self.sequence;
        self.sequence += 1;
        let mut state = self.group.lock();
        self.check(&state)?;
        let world = state.ends.len();
        let operation = state.operations.entry(sequence).or_insert_with(|| Operation {
            parts: vec![None; world],
            all: None,
            readers: 0,
        });
        operation.parts[self.rank] = Some(own);
        if operation.parts.iter().all(Option::is_some) {
            operation.all = Some(Arc::new(operation.parts.drain(..).flatten().collect()));
            self.group.changed.notify_all();
        }
        loop {
            let operation = state
                .operations
                .get_mut(&sequence)
                .expect("the operation stays until all ranks have read it");
            if let Some(all) = operation.all.clone() {
                operation.readers += 1;
                if operation.readers == world {
                    state.operations.remove(&sequence);
                }
                drop(state);
                return self.agree(all);
            }
            let is_missing = |rank: &usize| operation.parts[*rank].is_none();
            let missing: Vec<usize> = (0..world).filter(is_missing).collect();
            if let Some(Ending::Aborted) = state.ends[self.rank] {
                return Err(CollectiveError::Aborted { generation: self.group.generation });
            }
            if let Some(&rank) = missing.iter().find(|rank| state.ends[**rank].is_some()) {
                state.ends[self.rank] = Some(Ending::Failed);
                self.group.changed.notify_all();
                let source = std::io::ErrorKind::ConnectionAborted.into();
                return Err(CollectiveError::PeerLost { rank, member: rank as u64, source });
            }
            state = self.group.changed.wait(state).expect("nothing under this lock panics");
        }
    }

    /// Checks that the contributions of all ranks have the same kind and length.
    fn agree(&self, all: Arc<Vec<Part>>) -> Result<Arc<Vec<Part>>, CollectiveError> {
        let own = &all[self.rank];
        let Some(rank) = all.iter().position(|part| (part.kind, part.len) != (own.kind, own.len))
        else {
            return Ok(all);
        };
        self.group.lock().ends[self.rank] = Some(Ending::Failed);
        let (got, expected) = ((all[rank].kind, all[rank].len), (own.kind, own.len));
        let reason = format!("expected the operation {expected:?}, got {got:?}");
        Err(CollectiveError::Protocol { rank, member: rank as u64, reason })
    }

    fn check(&self, state: &State) -> Result<(), CollectiveError> {
        match state.ends[self.rank] {
            None => Ok(()),
            Some(_) => Err(CollectiveError::Aborted { generation: self.group.generation }),
        }
    }

    fn check_root(&self, root: usize) -> Result<(), CollectiveError> {
        let world = self.world_size();
        if root < world {
            return Ok(());
        }
        Err(CollectiveError::Invalid(format!("root {root} in a group of {world}")))
    }
}

impl LocalFence {
    /// Makes the rank's current operation and all future ones return [`CollectiveError::Aborted`].
    pub fn abort(&self) {
        self.group.lock().ends[self.rank] = Some(Ending::Aborted);
        self.group.changed.notify_all();
    }
}

impl Communicator for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.lock().ends.len()
    }

    fn generation(&self) -> u64 {
        self.group.generation
    }

    fn all_gather(&mut self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        check_block(block)?;
        let part = Part { bytes: block.to_vec(), ..Part::new("all-gather", 0) };
        Ok(self.meet(part)?.iter().map(|part| part.bytes.clone()).collect())
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        check_block(header)?;
        if src.len() != dst.len() {
            let reason = format!("a source of {} elements for a sum of {}", src.len(), dst.len());
            return Err(CollectiveError::Invalid(reason));
        }
        self.summed.push(src.len());
        let part = Part {
            bytes: header.to_vec(),
            floats: src.to_vec(),
            ..Part::new("all-reduce", src.len())
        };
        let all = self.meet(part)?;
        dst.copy_from_slice(&all[0].floats);
        for part in &all[1..] {
            dst.iter_mut().zip(&part.floats).for_each(|(sum, part)| *sum += part);
        }
        Ok(all.iter().map(|part| part.bytes.clone()).collect())
    }

    fn exchange(
        &mut self,
        send: &[&[u8]],
        receive: &mut Vec<Vec<u8>>,
    ) -> Result<(), CollectiveError> {
        check_payloads(send, self.world_size())?;
        let payloads = send.iter().map(|payload| payload.to_vec()).collect();
        let all = self.meet(Part { payloads, ..Part::new("exchange", 0) })?;
        *receive = all.iter().map(|part| part.payloads[self.rank].clone()).collect();
        Ok(())
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.check_root(root)?;
        if root == self.rank && bytes.len() > BROADCAST_BYTES_MAX {
            let reason =
                format!("a broadcast of {} bytes; the limit is {BROADCAST_BYTES_MAX}", bytes.len());
            return Err(CollectiveError::Invalid(reason));
        }
        let own = if root == self.rank { bytes.clone() } else { Vec::new() };
        let all = self.meet(Part { bytes: own, ..Part::new("broadcast of bytes", root) })?;
        bytes.clone_from(&all[root].bytes);
        Ok(())
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.check_root(root)?;
        let own = if root == self.rank { buf.to_vec() } else { Vec::new() };
        let all = self.meet(Part { floats: own, ..Part::new("broadcast", buf.len()) })?;
        if all[root].floats.len() != buf.len() {
            let reason = "the root's buffer has another length".to_owned();
            return Err(CollectiveError::Protocol { rank: root, member: root as u64, reason });
        }
        buf.copy_from_slice(&all[root].floats);
        Ok(())
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        self.group.lock().ends[self.rank].get_or_insert(Ending::Left);
        self.group.changed.notify_all();
    }
}

#[derive(Debug)]
struct Barrier {
    generation: u64,
    state: Mutex<State>,
    changed: Condvar,
}

impl Barrier {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing under this lock panics")
    }
}

#[derive(Debug)]
struct State {
    /// Operations by sequence number. Ranks can be in different operations at the same time.
    operations: BTreeMap<u64, Operation>,
    /// Why each rank has ended, by rank.
    ends: Vec<Option<Ending>>,
}

/// Why a rank has left the group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Ending {
    Aborted,
    Failed,
    Left,
}

#[derive(Debug)]
struct Operation {
    /// Contributions by rank, until all have arrived.
    parts: Vec<Option<Part>>,
    all: Option<Arc<Vec<Part>>>,
    /// Number of ranks that have read the result.
    readers: usize,
}

/// Contribution of a rank to an operation.
#[derive(Clone, Debug)]
struct Part {
    kind: &'static str,
    /// Length of the buffer, or the root; identical on all ranks.
    len: usize,
    bytes: Vec<u8>,
    floats: Vec<f32>,
    /// Payloads by receiver.
    payloads: Vec<Vec<u8>>,
}

impl Part {
    fn new(kind: &'static str, len: usize) -> Self {
        Self { kind, len, bytes: Vec::new(), floats: Vec::new(), payloads: Vec::new() }
    }
}

fn check_block(block: &[u8]) -> Result<(), CollectiveError> {
    if block.len() <= BLOCK_BYTES_MAX {
        return Ok(());
    }
    let reason = format!("a block of {} bytes; the limit is {BLOCK_BYTES_MAX}", block.len());
    Err(CollectiveError::Invalid(reason))
}
