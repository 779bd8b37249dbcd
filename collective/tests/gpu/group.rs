//! Groups of ranks with fake GPUs.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path as File;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaSlice;
use elasticdl_collective::device::{Device, DeviceGroup, Element, NcclOptions, NcclPolicy, Path};
use elasticdl_collective::nccl::{Library, NcclState};
use elasticdl_collective::testing::conformance::{Group, Rank};
use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, EndpointOptions, Fence, GroupSpec, Member, Secret,
};

/// One rank: its group, and the endpoint, which outlives the group.
pub(crate) struct Gpu {
    pub(crate) ring: DeviceGroup,
    pub(crate) fence: Fence,
    _end: Arc<Endpoint>,
}

/// Builds a group of `world` ranks with one GPU each.
pub(crate) fn group(world: usize) -> Vec<Gpu> {
    elasticdl_stand_ins::load();
    let ends: Vec<_> = (0..world as u64)
        .map(|id| {
            let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let options = EndpointOptions::new("job", id, Secret::new("secret"));
            Arc::new(Endpoint::bind(ip, options).expect("loopback has free ports"))
        })
        .collect();
    regroup(&ends.iter().collect::<Vec<_>>(), 1)
}

fn regroup(ends: &[&Arc<Endpoint>], generation: u64) -> Vec<Gpu> {
    let members = (0..).zip(ends).map(|(id, end)| Member { id, address: end.address() }).collect();
    let spec = GroupSpec { generation, members };
    thread::scope(|scope| {
        let connect = |end: &Arc<Endpoint>| end.connect(&spec, WATCHDOG);
        let rings: Vec<_> =
            ends.iter().map(|end| ((*end).clone(), scope.spawn(move || connect(end)))).collect();
        let rings = rings.into_iter().enumerate().map(|(ordinal, (end, ring))| {
            let ring =
                ring.join().expect("the thread does not panic").expect("all members connect");
            let device = Device::open(ordinal).expect("the fake driver has enough devices");
            Gpu { ring: DeviceGroup::new(ring, device), fence: end.fence(), _end: end }
        });
        rings.collect()
    })
}

/// Policy that uses the fake NCCL with this fault, with short limits where it hangs.
pub(crate) fn nccl(fault: &str) -> NcclPolicy {
    let file = match fault {
        "" => elasticdl_stand_ins::folder().join("libnccl.so.2"),
        fault => elasticdl_stand_ins::nccl_with(fault),
    };
    let options = NcclOptions {
        init_timeout: Duration::from_secs(if fault.starts_with("init_") { 1 } else { 60 }),
        abort_timeout: Duration::from_secs(if fault == "abort_blocks" { 1 } else { 600 }),
        ..NcclOptions::default()
    };
    NcclPolicy::On(open(&file), options)
}

fn open(file: &File) -> Arc<Library> {
    Library::open(file).expect("the fake NCCL exists")
}

impl Gpu {
    /// Waits until the initialization of NCCL has succeeded or failed.
    pub(crate) fn wait_for_nccl(&self) -> NcclState {
        let begun = Instant::now();
        loop {
            match self.ring.nccl_state() {
                NcclState::Building => {
                    assert!(begun.elapsed() < WATCHDOG, "the initialization hangs");
                    thread::sleep(Duration::from_millis(1));
                }
                state => return state,
            }
        }
    }

    /// Waits until NCCL has released the communicator.
    pub(crate) fn wait_for_release(&self) {
        let begun = Instant::now();
        while self.ring.nccl_abort_time().is_none() {
            assert!(begun.elapsed() < WATCHDOG, "the abort hangs");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Copies numbers to the device.
    pub(crate) fn put<T: Element>(&self, numbers: &[T]) -> Result<CudaSlice<T>, CollectiveError> {
        let stream = self.ring.device().stream();
        // The driver does not allocate zero bytes.
        let mut memory = stream.alloc_zeros(numbers.len().max(1)).expect("there is memory");
        if !numbers.is_empty() {
            stream.memcpy_htod(numbers, &mut memory).expect("the copy succeeds");
        }
        Ok(memory)
    }

    pub(crate) fn get<T: Element>(&self, memory: &CudaSlice<T>, len: usize) -> Vec<T> {
        let stream = self.ring.device().stream();
        let mut numbers = stream.clone_dtoh(memory).expect("the copy succeeds");
        stream.synchronize().expect("the stream ends");
        numbers.truncate(len);
        numbers
    }
}

/// Runs `act` on every rank concurrently.
pub(crate) fn on_all<T: Send>(group: &mut [Gpu], act: impl Fn(&mut Gpu) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let act = &act;
        let runs: Vec<_> = group
            .iter_mut()
            .map(|gpu| {
                scope.spawn(move || {
                    let _ended = Ended(gpu.fence.clone());
                    act(gpu)
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().expect("the thread does not panic")).collect()
    })
}

/// Aborts the group of a rank that panics, so that the other ranks do not wait for it.
struct Ended(Fence);

impl Drop for Ended {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort_before(u64::MAX);
        }
    }
}

/// Adapter for the conformance suite: operations on host memory that run on the device.
struct OnDevice {
    gpu: Gpu,
    path: Path,
}

pub(crate) fn form(world: usize, path: Path) -> Group {
    let mut group = group(world);
    if path == Path::Nccl {
        let nccl = nccl("");
        let states = on_all(&mut group, |gpu| {
            gpu.ring.begin_nccl(&nccl).expect("the host path works");
            gpu.wait_for_nccl()
        });
        assert_eq!(states, vec![NcclState::Ready; world]);
    }
    let ranks = group.into_iter().map(|gpu| {
        let fence = gpu.fence.clone();
        let communicator = Box::new(OnDevice { gpu, path });
        Rank { communicator, abort: Arc::new(move || fence.abort_before(2)) }
    });
    ranks.collect()
}

impl Communicator for OnDevice {
    fn rank(&self) -> usize {
        self.gpu.ring.host().rank()
    }

    fn world_size(&self) -> usize {
        self.gpu.ring.host().world_size()
    }

    fn generation(&self) -> u64 {
        self.gpu.ring.host().generation()
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.gpu.ring.host_mut().all_gather(mine)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let (from, mut to) = (self.gpu.put(src)?, self.gpu.put(dst)?);
        let (from_view, mut to_view) = (from.slice(..src.len()), to.slice_mut(..dst.len()));
        let headers =
            self.gpu.ring.all_reduce_device(header, &from_view, &mut to_view, self.path)?;
        let bits =
            |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert!(bits(&self.gpu.get(&from, src.len())) == bits(src), "the source has changed");
        dst.copy_from_slice(&self.gpu.get(&to, dst.len()));
        Ok(headers)
    }

    fn exchange(
        &mut self,
        send: &[&[u8]],
        receive: &mut Vec<Vec<u8>>,
    ) -> Result<(), CollectiveError> {
        self.gpu.ring.host_mut().exchange(send, receive)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.gpu.ring.host_mut().broadcast_bytes(root, bytes)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        let mut memory = self.gpu.put(buf)?;
        self.gpu.ring.broadcast_device(root, &mut memory.slice_mut(..buf.len()), self.path)?;
        buf.copy_from_slice(&self.gpu.get(&memory, buf.len()));
        Ok(())
    }
}

/// Limit that only a hang reaches.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);
