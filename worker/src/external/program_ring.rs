//! Collective operations for a program that forms groups of its own.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elasticdl_collective::{
    BROADCAST_BYTES_MAX, CollectiveError, Communicator as _, Endpoint, EndpointOptions, Fence,
    GroupSpec, HostGroup, Member, PAYLOAD_BYTES_MAX, Secret,
};

use super::worker::WorkerError;

#[cfg(feature = "gpu")]
mod on_gpu;

#[cfg(feature = "gpu")]
use elasticdl_collective::device::DeviceGroup;

/// One rank of a group of programs.
#[derive(Debug)]
pub struct ProgramRing {
    state: Mutex<State>,
    fence: Fence,
}

/// The members of a group of programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingMembers {
    /// Name of the group; links between groups of different names are refused.
    pub name: String,
    /// Known to all members and to no other program.
    pub secret: Vec<u8>,
    /// Rank of this program.
    pub rank: usize,
    /// Addresses at which the members listen, by rank.
    pub addresses: Vec<SocketAddr>,
}

#[derive(Debug)]
struct State {
    group: Group,
    /// Result of an all-reduce, whose input must not change.
    sum: Vec<f32>,
    /// What other ranks give to a sum of parts.
    scratch: Vec<f32>,
    /// Accepts the links of the group.
    _endpoint: Endpoint,
}

#[derive(Debug)]
enum Group {
    Ended,
    Host(Box<HostGroup>),
    /// And whether it has NCCL.
    #[cfg(feature = "gpu")]
    OnGpu(Box<DeviceGroup>, bool),
}

impl Group {
    /// The operations on memory of the host.
    fn host(&mut self) -> Result<&mut HostGroup, WorkerError> {
        match self {
            Self::Ended => Err(WorkerError::Failed("the group was shut down".to_owned())),
            Self::Host(group) => Ok(group),
            #[cfg(feature = "gpu")]
            Self::OnGpu(group, _) => Ok(group.host_mut()),
        }
    }
}

impl ProgramRing {
    /// Connects the group, within `timeout`. `listener`: at this rank's address.
    ///
    /// # Errors
    /// The members are invalid, or one of them can't be reached.
    pub fn connect(
        listener: TcpListener,
        members: RingMembers,
        timeout: Duration,
    ) -> Result<Self, WorkerError> {
        let RingMembers { name, secret, rank, addresses } = members;
        let options = EndpointOptions::new(&name, rank as u64, Secret::new(secret));
        let endpoint = Endpoint::from_listener(listener, options).map_err(failed)?;
        let members = addresses.into_iter().zip(0..).map(|(address, id)| Member { id, address });
        let spec = GroupSpec { generation: 1, members: members.collect() };
        let group = endpoint.connect(&spec, timeout).map_err(failed)?;
        let fence = endpoint.fence();
        let group = Group::Host(Box::new(group));
        let state = State { group, sum: Vec::new(), scratch: Vec::new(), _endpoint: endpoint };
        Ok(Self { state: Mutex::new(state), fence })
    }

    /// Replaces `values` by their sum over all ranks.
    ///
    /// # Errors
    /// The links broke. `values` are then as before.
    pub fn all_reduce(&self, values: &mut [f32]) -> Result<(), WorkerError> {
        let State { group, sum, .. } = &mut *self.state();
        let group = group.host()?;
        if sum.len() < values.len() {
            sum.resize(values.len(), 0.0);
        }
        let sum = &mut sum[..values.len()];
        group.all_reduce(&[], values, sum).map_err(failed)?;
        values.copy_from_slice(sum);
        Ok(())
    }

    /// The bytes of every rank, which has as many as this one, in rank order.
    ///
    /// # Errors
    /// The links broke.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, WorkerError> {
        let world = self.state().group.host()?.world_size();
        let mut gathered = vec![vec![0; bytes.len()]; world];
        let mut parts: Vec<&mut [u8]> = gathered.iter_mut().map(Vec::as_mut_slice).collect();
        self.gather(bytes, &mut parts)?;
        drop(parts);
        Ok(gathered)
    }

    /// Replaces each of `parts`, one for each rank and all as long as `bytes`, by the bytes of that
    /// rank.
    ///
    /// # Errors
    /// The links broke, or lengths differ. `parts` hold anything then.
    pub fn gather(&self, bytes: &[u8], parts: &mut [&mut [u8]]) -> Result<(), WorkerError> {
        let (state, expected) = (&mut *self.state(), bytes.len());
        let group = state.group.host()?;
        let world = group.world_size();
        if parts.len() != world || parts.iter().any(|part| part.len() != expected) {
            let lens: Vec<usize> = parts.iter().map(|part| part.len()).collect();
            let error =
                format!("buffers of {lens:?} bytes for {expected} of each of {world} ranks");
            return Err(WorkerError::Failed(error));
        }
        if expected <= ONE_BLOCK_BYTES_MAX {
            // Nothing is gathered, too: it is how ranks wait for each other.
            let blocks = group.all_gather(bytes).map_err(failed)?;
            for (rank, (block, part)) in blocks.iter().zip(parts).enumerate() {
                if block.len() != expected {
                    let error =
                        format!("rank {rank} gives {} bytes, expected {expected}", block.len());
                    return Err(WorkerError::Failed(error));
                }
                part.copy_from_slice(block);
            }
            return Ok(());
        }
        let mut rest: Vec<&mut [u8]> = parts.iter_mut().map(|part| &mut **part).collect();
        for own in bytes.chunks(PAYLOAD_BYTES_MAX) {
            let split = rest.into_iter().map(|part| part.split_at_mut(own.len()));
            let (mut into, others): (Vec<_>, Vec<_>) = split.unzip();
            rest = others;
            group.exchange_into(&vec![own; world], &mut into).map_err(failed)?;
        }
        Ok(())
    }

    /// Replaces `sum` by the sum of what all ranks give to this one, in rank order. `given`: one
    /// slice for each rank, as long as its `sum`.
    ///
    /// # Errors
    /// The links broke, or lengths differ. `sum` is then as before.
    pub fn reduce_scatter(&self, given: &[&[f32]], sum: &mut [f32]) -> Result<(), WorkerError> {
        let State { group, scratch, .. } = &mut *self.state();
        group.host()?.reduce_scatter(given, sum, scratch).map_err(failed)
    }

    /// Replaces `bytes` by those of `root`, which has as many.
    ///
    /// # Errors
    /// The links broke, or the root has another number of bytes.
    pub fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<(), WorkerError> {
        let state = &mut *self.state();
        let group = state.group.host()?;
        let is_root = group.rank() == root;
        for part in bytes.chunks_mut(BROADCAST_BYTES_MAX) {
            let mut sent = if is_root { part.to_vec() } else { Vec::new() };
            group.broadcast_bytes(root, &mut sent).map_err(failed)?;
            if sent.len() != part.len() {
                let (expected, found) = (part.len(), sent.len());
                let error = format!("rank {root} broadcasts {found} bytes, expected {expected}");
                return Err(WorkerError::Failed(error));
            }
            part.copy_from_slice(&sent);
        }
        Ok(())
    }

    /// Gives each rank its element of `send`, and fills each element of `receive` with what that
    /// rank gives to this one.
    ///
    /// # Errors
    /// The links broke, there is not one element per rank, or a rank gives another number of bytes
    /// than its element of `receive` has, which then holds anything.
    pub fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), WorkerError> {
        self.state().group.host()?.exchange_into(send, receive).map_err(failed)
    }

    /// Ends this rank's part of the group: its operations fail. NCCL is released in the background.
    pub fn end(&self) {
        self.state().group = Group::Ended;
    }

    /// Ends the group: operations fail on every rank.
    pub fn abort(&self) {
        self.fence.abort_before(u64::MAX);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error with its causes.
fn failed(error: CollectiveError) -> WorkerError {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    WorkerError::Failed(text)
}

/// Largest part of a rank that is gathered along the ring. Above, each rank gives it to each other.
const ONE_BLOCK_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Runs `act` as each rank of a group of three.
    fn as_group<T: Send>(act: impl Fn(&ProgramRing, usize) -> T + Sync) -> Vec<T> {
        let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let addresses: Vec<SocketAddr> =
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        // No rank acts before all are connected, or closes its links before all have acted.
        let barrier = Barrier::new(3);
        thread::scope(|scope| {
            let run = |(rank, listener)| {
                let (addresses, act, barrier) = (addresses.clone(), &act, &barrier);
                scope.spawn(move || {
                    let (name, secret) = ("test".into(), b"secret".to_vec());
                    let members = RingMembers { name, secret, rank, addresses };
                    let limit = Duration::from_secs(20);
                    let ring = ProgramRing::connect(listener, members, limit).unwrap();
                    barrier.wait();
                    let result = act(&ring, rank);
                    barrier.wait();
                    result
                })
            };
            let threads: Vec<_> = (0..).zip(listeners).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_get_sums_gathered_blocks_and_broadcasts() {
        let all = as_group(|ring, rank| {
            let mut values = [rank as f32, 1.0, -0.5];
            ring.all_reduce(&mut values).unwrap();
            let gathered = ring.all_gather(&[rank as u8; 2]).unwrap();
            assert_eq!(ring.all_gather(&[]).unwrap(), [[0; 0]; 3]);
            let mut bytes = [rank as u8; 3];
            ring.broadcast(1, &mut bytes).unwrap();
            (values, gathered, bytes)
        });
        let expected = ([3.0, 3.0, -1.5], vec![vec![0; 2], vec![1; 2], vec![2; 2]], [1; 3]);
        assert_eq!(all, vec![expected; 3]);
    }

    #[test]
    fn an_exchange_gives_each_rank_its_bytes_and_refuses_other_lengths() {
        let all = as_group(|ring, rank| {
            let given = [vec![rank as u8; 1], vec![rank as u8; 2], vec![rank as u8; 3]];
            let send: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
            let mut taken = [(); 3].map(|()| vec![9; rank + 1]);
            let mut receive: Vec<&mut [u8]> = taken.iter_mut().map(Vec::as_mut_slice).collect();
            ring.exchange(&send, &mut receive).unwrap();
            // Rank 2 expects a byte less of rank 1.
            let less = usize::from(rank == 2);
            let mut receive: Vec<&mut [u8]> = Vec::new();
            let mut other = [(); 3].map(|()| vec![9; rank + 1]);
            for (from, into) in other.iter_mut().enumerate() {
                receive.push(if from == 1 { &mut into[less..] } else { into });
            }
            let differs = ring.exchange(&send, &mut receive);
            assert!(ring.exchange(&send, &mut receive[..2]).is_err());
            (taken.concat(), differs)
        });
        let (taken, differ): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        assert_eq!(taken, [vec![0, 1, 2], vec![0, 0, 1, 1, 2, 2], vec![0, 0, 0, 1, 1, 1, 2, 2, 2]]);
        let error = format!("{:?}", differ[2]);
        assert!(error.contains("expected a payload of 2 bytes, got 3"), "{error}");
    }

    #[test]
    fn each_rank_gets_the_sum_of_its_parts_and_gathers_those_of_all() {
        let all = as_group(|ring, rank| {
            let given = [0.5, 1.5, 2.5].map(|part| [part + rank as f32; 2]);
            let given: Vec<&[f32]> = given.iter().map(<[f32; 2]>::as_slice).collect();
            let mut sum = [0.0; 2];
            ring.reduce_scatter(&given, &mut sum).unwrap();
            assert!(ring.reduce_scatter(&given[..2], &mut sum).is_err());
            for len in [1, ONE_BLOCK_BYTES_MAX + 1] {
                let mut parts = vec![vec![9; len]; 3];
                let mut into: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
                ring.gather(&vec![rank as u8; len], &mut into).unwrap();
                assert!(ring.gather(&[], &mut into).is_err(), "buffers of another length");
                assert!(parts == [0, 1, 2].map(|rank| vec![rank; len]));
            }
            sum
        });
        assert_eq!(all, [[4.5; 2], [7.5; 2], [10.5; 2]]);
    }

    #[test]
    fn an_abort_ends_the_operations_of_all_ranks() {
        let all = as_group(|ring, rank| {
            if rank == 0 {
                ring.abort();
            }
            let mut values = vec![1.0; 1000];
            let error = ring.all_reduce(&mut values).unwrap_err();
            assert_eq!(values, vec![1.0; 1000]);
            error.to_string()
        });
        assert!(all.iter().all(|error| !error.is_empty()), "{all:?}");
    }

    #[test]
    fn a_broadcast_of_another_length_is_refused() {
        let all = as_group(|ring, rank| ring.broadcast(0, &mut vec![0; 3 + rank / 2]));
        assert!(all[0].is_ok() && all[1].is_ok());
        let error = WorkerError::Failed("rank 0 broadcasts 3 bytes, expected 4".into());
        assert_eq!(all[2], Err(error));
    }
}
