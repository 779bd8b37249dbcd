use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{DevicePtr, DevicePtrMut};

use super::{Device, DeviceError, Element};
use crate::nccl::{Buffers, Call, CallKind, Library, Limits, NcclCommunicator, NcclState, Place};
use crate::patience::Patience;
use crate::tcp::Beside;
use crate::{BLOCK_BYTES_MAX, CollectiveError, Communicator, TcpRing};

mod offer;
mod staged;

use offer::Offer;

/// A group's ring whose ranks have a GPU each: the operations of [`Communicator`] on host memory,
/// and those below on the device's.
///
/// All of the group have one; all say the same [`Path`] in an operation. Operations come behind
/// what is on the [device's stream](Device::stream), and what is enqueued there after them finds
/// their result.
#[derive(Debug)]
pub struct DeviceRing {
    /// Dropped first: what NCCL does must not outlive the links that tell of a peer's end.
    nccl: Nccl,
    ring: TcpRing,
    device: Device,
}

/// What an operation on device memory goes over. The same on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Path {
    /// Page-locked memory and the host's ring. Always there.
    Host,
    /// NCCL. Only once every rank has said in an operation that its [state](DeviceRing::nccl_state)
    /// is ready.
    Nccl,
}

/// Whether a rank would use NCCL.
#[derive(Clone, Debug)]
pub enum NcclPolicy {
    /// It would not, for a reason that the status shows.
    Off(String),
    /// It would, with this library.
    On(Arc<Library>, NcclOptions),
}

/// How NCCL is used.
#[derive(Clone, Copy, Debug)]
pub struct NcclOptions {
    /// How long a communicator may take to be made before the group does without.
    pub init_limit: Duration,
    /// How long NCCL may take to give a communicator back before it is [given
    /// up](crate::nccl::abandoned).
    pub abort_limit: Duration,
    /// Also where two ranks share a GPU, which NCCL refuses unless its environment says that they
    /// are on different hosts. To try out.
    pub on_shared_gpus: bool,
}

#[derive(Debug)]
enum Nccl {
    Absent(String),
    Begun(NcclCommunicator),
}

impl DeviceRing {
    /// `ring`: of this generation. Operations go over it until NCCL is there.
    #[must_use]
    pub fn new(ring: TcpRing, device: Device) -> Self {
        Self { nccl: Nccl::Absent("it was not asked for".to_owned()), ring, device }
    }

    /// This rank's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The host's ring.
    #[must_use]
    pub fn host(&self) -> &TcpRing {
        &self.ring
    }

    /// Agrees with all others whether the group gets a communicator of NCCL, and begins to make it
    /// in the background. An operation of the group: all ranks call it at the same place, whatever
    /// their policy. What was begun before is ended.
    ///
    /// The group does without ([`NcclState::Absent`]) where a rank would not use it, where versions
    /// differ, and where ranks share a GPU.
    ///
    /// # Errors
    /// [`CollectiveError`], of the host's ring. That NCCL can't be used is no error.
    pub fn begin_nccl(&mut self, policy: &NcclPolicy) -> Result<(), CollectiveError> {
        self.nccl = Nccl::Absent("it is being agreed on".to_owned());
        let offers = self.ring.gather_beside(&Offer::of(policy, self.device.uuid()).encode())?;
        let offers: Vec<_> = offers.iter().map(|bytes| Offer::decode(bytes)).collect();
        let agreed = offer::agree(&offers);
        let (NcclPolicy::On(library, options), Ok(())) = (policy, &agreed) else {
            let reason = agreed.err().unwrap_or_else(|| "this rank would not".to_owned());
            self.nccl = Nccl::Absent(reason);
            return Ok(());
        };
        let mut bytes = Vec::new();
        if self.ring.rank() == 0 {
            match library.unique_id() {
                Ok(id) => bytes = id.as_bytes().to_vec(),
                Err(error) => tracing::warn!(%error, "no communicator of NCCL"),
            }
        }
        self.ring.broadcast_bytes(0, &mut bytes)?;
        let Some(id) = crate::nccl::UniqueId::from_bytes(&bytes) else {
            self.nccl = Nccl::Absent("rank 0 could not draw a unique id".to_owned());
            return Ok(());
        };
        let (rank, world) = (self.ring.rank(), self.ring.world_size());
        let place = Place { id, rank, world, stream: self.device.stream().clone() };
        let limits = Limits { init: options.init_limit, abort: options.abort_limit };
        let begun = NcclCommunicator::begin(library, place, limits);
        let action = "begin to make a communicator of NCCL";
        self.nccl = Nccl::Begun(begun.map_err(|source| CollectiveError::Io { action, source })?);
        Ok(())
    }

    /// How far this rank is with NCCL. Cheap: to be asked at every step's end, and told to the
    /// others.
    #[must_use]
    pub fn nccl_state(&self) -> NcclState {
        match &self.nccl {
            Nccl::Absent(reason) => NcclState::Absent(reason.clone()),
            Nccl::Begun(communicator) => communicator.state(),
        }
    }

    /// How long NCCL took to give back this group's communicator, if it was aborted and that has
    /// returned.
    #[must_use]
    pub fn nccl_abort_took(&self) -> Option<Duration> {
        match &self.nccl {
            Nccl::Absent(_) => None,
            Nccl::Begun(communicator) => communicator.abort_took(),
        }
    }

    /// Puts the element-wise sum of all ranks' `src` into every rank's `dst`, and returns every
    /// rank's `header` in rank order. `src` is only read, so that a failed step can be contributed
    /// again. All ranks get the same bits.
    ///
    /// `header`: at most [`HEADER_BYTES_MAX`] bytes. `src`, `dst`: `[len]`, the same on every rank,
    /// on this ring's device.
    ///
    /// # Errors
    /// [`CollectiveError`]; `dst` then holds unspecified values. [`CollectiveError::Device`] with
    /// [`DeviceError::Abandoned`]: NCCL still holds the device's stream, so that the process has to
    /// end.
    pub fn all_reduce_device<T: Element>(
        &mut self,
        header: &[u8],
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
        path: Path,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ring.check_alive()?;
        check_header(header)?;
        check_len(src.len(), dst.len(), "a sum")?;
        if path == Path::Host {
            return self.sum_staged(header, src, dst);
        }
        let stream = self.device.stream().clone();
        let len = src.len();
        let ((src, _read), (dst, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        let buffers = Buffers { src, dst, len, dtype: T::DTYPE };
        self.over_nccl(header, Call { kind: CallKind::AllReduce, buffers })
    }

    /// Replaces `buf` on every rank with that of rank `root`.
    ///
    /// `buf`: `[len]`, the same on every rank, on this ring's device.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device).
    pub fn broadcast_device<T: Element>(
        &mut self,
        root: usize,
        buf: &mut impl DevicePtrMut<T>,
        path: Path,
    ) -> Result<(), CollectiveError> {
        self.ring.check_alive()?;
        if root >= self.ring.world_size() {
            let reason = format!("root {root} in a group of {}", self.ring.world_size());
            return Err(CollectiveError::Invalid(reason));
        }
        if path == Path::Host {
            return self.broadcast_staged(root, buf);
        }
        let stream = self.device.stream().clone();
        let len = buf.len();
        let (both, _written) = buf.device_ptr_mut(&stream);
        let buffers = Buffers { src: both, dst: both, len, dtype: T::DTYPE };
        self.over_nccl(&[], Call { kind: CallKind::Broadcast { root }, buffers }).map(drop)
    }

    /// Puts every rank's `src`, in rank order, into every rank's `dst`.
    ///
    /// `src`: `[len]`, the same on every rank; `dst`: `[world_size · len]`; both on this ring's
    /// device.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device).
    pub fn all_gather_device<T: Element>(
        &mut self,
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
        path: Path,
    ) -> Result<(), CollectiveError> {
        self.ring.check_alive()?;
        check_len(src.len() * self.ring.world_size(), dst.len(), "all")?;
        if path == Path::Host {
            return self.gather_staged(src, dst);
        }
        let stream = self.device.stream().clone();
        let len = src.len();
        let ((src, _read), (dst, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        let buffers = Buffers { src, dst, len, dtype: T::DTYPE };
        self.over_nccl(&[], Call { kind: CallKind::AllGather, buffers }).map(drop)
    }

    /// NCCL's thread moves the elements while this one tells the headers, and then watches the
    /// links: their ends are how a peer's end shows.
    fn over_nccl(&mut self, header: &[u8], call: Call) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let Nccl::Begun(communicator) = &self.nccl else {
            return Err(CollectiveError::Invalid(
                "this group has no communicator of NCCL".to_owned(),
            ));
        };
        if communicator.state() != NcclState::Ready {
            return Err(CollectiveError::Invalid("NCCL is not ready".to_owned()));
        }
        communicator.call(call);
        let told = self.ring.gather_beside(&framed(header, call.buffers.len));
        let told = told.and_then(|told| unframed(&self.ring, told, call.buffers.len));
        let done = told.and_then(|headers| {
            wait_for_nccl(&self.ring, communicator, call.buffers.len)?;
            Ok(headers)
        });
        done.map_err(|error| self.stop_nccl(error))
    }

    /// Ends the group after an operation over NCCL has failed. What is on the device's stream then
    /// ends, or this says that it does not.
    fn stop_nccl(&mut self, error: CollectiveError) -> CollectiveError {
        self.ring.give_up();
        let Nccl::Begun(communicator) = &self.nccl else { return error };
        communicator.abort(&error.to_string());
        match communicator.wait_until_ended() {
            Ok(()) => error,
            Err(source) => {
                // To release the device waits for what hangs there; the process's end does not.
                std::mem::forget(self.device.clone());
                CollectiveError::Device { source }
            }
        }
    }
}

fn wait_for_nccl(
    ring: &TcpRing,
    communicator: &NcclCommunicator,
    len: usize,
) -> Result<(), CollectiveError> {
    let mut patience = Patience::of(len * size_of::<f32>());
    let mut gone: Option<(Instant, CollectiveError)> = None;
    loop {
        if let Some(result) = communicator.result() {
            return result.map_err(|source| CollectiveError::Device { source });
        }
        if gone.is_none() && patience.lasts() {
            continue;
        }
        let left = match &gone {
            None => LOOK_EVERY,
            Some((since, _)) => LEAVER_TIME_MAX.saturating_sub(since.elapsed()),
        };
        if left.is_zero()
            && let Some((_, error)) = gone
        {
            return Err(error);
        }
        if gone.is_some() {
            std::thread::sleep(left.min(Duration::from_micros(100)));
        } else if let Beside::NeighbourGone(error) =
            ring.wait_beside(communicator.finished(), left)?
        {
            // It may have left because all is done; then it is done here in a moment.
            gone = Some((Instant::now(), error));
        }
    }
}

impl NcclPolicy {
    /// NCCL with its defaults, if the system has it.
    #[must_use]
    pub fn auto() -> Self {
        match Library::find() {
            Ok(library) => Self::On(library, NcclOptions::default()),
            Err(error) => Self::Off(error.to_string()),
        }
    }

    /// NCCL from this file, with its defaults.
    #[must_use]
    pub fn from_file(path: &std::path::Path) -> Self {
        match Library::open(path) {
            Ok(library) => Self::On(library, NcclOptions::default()),
            Err(error) => Self::Off(error.to_string()),
        }
    }
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            init_limit: Duration::from_secs(60),
            abort_limit: Duration::from_secs(5),
            on_shared_gpus: false,
        }
    }
}

impl Communicator for DeviceRing {
    fn rank(&self) -> usize {
        self.ring.rank()
    }

    fn world_size(&self) -> usize {
        self.ring.world_size()
    }

    fn generation(&self) -> u64 {
        self.ring.generation()
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ring.all_gather(mine)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ring.all_reduce(header, src, dst)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.ring.broadcast_bytes(root, bytes)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.ring.broadcast(root, buf)
    }
}

impl Drop for DeviceRing {
    /// Who leaves when all is done may be ahead of others, which are still in NCCL's last sum and
    /// take an end of a link for a loss: the links stay a little longer.
    fn drop(&mut self) {
        if self.nccl_state() == NcclState::Ready && self.ring.check_alive().is_ok() {
            let links = self.ring.links_to_hold();
            let hold = move || {
                std::thread::sleep(LINGER);
                drop(links);
            };
            // Without a thread for it they end now.
            let _ = std::thread::Builder::new().name("ring-linger".to_owned()).spawn(hold);
        }
    }
}

impl From<DeviceError> for CollectiveError {
    fn from(source: DeviceError) -> Self {
        Self::Device { source }
    }
}

/// A header with the buffer's length in front: what the ring itself does not see is compared, too.
fn framed(header: &[u8], len: usize) -> Vec<u8> {
    [&(len as u64).to_le_bytes(), header].concat()
}

fn unframed(
    ring: &TcpRing,
    told: Vec<Vec<u8>>,
    len: usize,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let unframe = |(rank, mut framed): (usize, Vec<u8>)| {
        let its = framed.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if its != Some(len as u64) {
            let its = its.map_or_else(|| "none".to_owned(), |its| its.to_string());
            let reason = format!("expected a buffer length of {len} elements, got {its}");
            return Err(ring.broken_by(rank, reason));
        }
        framed.drain(..FRAMING_BYTES);
        Ok(framed)
    };
    told.into_iter().enumerate().map(unframe).collect()
}

fn check_header(header: &[u8]) -> Result<(), CollectiveError> {
    if header.len() <= HEADER_BYTES_MAX {
        return Ok(());
    }
    let reason =
        format!("a header of {} bytes; at most {HEADER_BYTES_MAX} are possible", header.len());
    Err(CollectiveError::Invalid(reason))
}

fn check_len(src: usize, dst: usize, what: &str) -> Result<(), CollectiveError> {
    if src == dst {
        return Ok(());
    }
    Err(CollectiveError::Invalid(format!("a source of {src} elements for {what} of {dst}")))
}

/// The longest header of a sum on device memory, in bytes.
pub const HEADER_BYTES_MAX: usize = BLOCK_BYTES_MAX - FRAMING_BYTES;

const FRAMING_BYTES: usize = size_of::<u64>();

/// How long a rank that has heard of a neighbour's end lets NCCL come to its own: who leaves after
/// an operation has had its part in it.
const LEAVER_TIME_MAX: Duration = Duration::from_millis(20);

/// Far beyond what ranks are apart at the end of a sum.
const LINGER: Duration = Duration::from_millis(250);

/// The fence and the links wake the wait; this is for nothing that is known.
const LOOK_EVERY: Duration = Duration::from_secs(1);
