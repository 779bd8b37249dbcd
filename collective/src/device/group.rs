//! A rank's group with a GPU at each rank: it chooses the path of an operation on device memory,
//! and ends the group when NCCL fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{DevicePtr, DevicePtrMut};
use rustix::event::{PollFd, PollFlags};

use super::{Device, DeviceError, Element};
use crate::device::nccl::{
    Buffers, Call, CallKind, CommInit, Library, NcclCommunicator, NcclState, Timeouts, abandoned,
};
use crate::group::host_group::WaitOutcome;
use crate::net::link::Link;
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;
use crate::{BLOCK_BYTES_MAX, CollectiveError, Communicator, EncryptedLinks, HostGroup};

mod direct;
mod nccl_offer;
mod overlap;
mod place;
mod staged;

use nccl_offer::NcclOffer;
pub use overlap::Overlap;

/// Group whose ranks have one GPU each: the operations of [`Communicator`] on host memory, by
/// [`host_mut`](Self::host_mut), and the operations below on device memory.
///
/// Every rank of the group has a `DeviceGroup`, and all ranks pass the same [`Path`] to an
/// operation. Operations run after the work that is already on the [device's
/// stream](Device::stream), and work enqueued later sees their results.
#[derive(Debug)]
pub struct DeviceGroup {
    /// Dropped first: NCCL's work must not outlive the links that report the end of a peer.
    nccl: Nccl,
    host: HostGroup,
    device: Device,
    /// Whether sums are in progress that [`overlap`](Self::overlap) has begun.
    is_summing: bool,
}

/// Data path of an operation on device memory; identical on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Path {
    /// Page-locked memory and the host group. Always available.
    Host,
    /// NCCL. Available once every rank has reported in an operation that its
    /// [state](DeviceGroup::nccl_state) is ready.
    Nccl,
}

/// Whether a rank is willing to use NCCL.
#[derive(Clone, Debug)]
pub enum NcclPolicy {
    /// NCCL is off, for a reason that the status shows.
    Off(String),
    /// NCCL is on, with this library.
    On(Arc<Library>, NcclOptions),
}

/// Options of NCCL.
#[derive(Clone, Copy, Debug)]
pub struct NcclOptions {
    /// Limit of a communicator's initialization. After it, the group continues without NCCL.
    pub init_timeout: Duration,
    /// Limit of a communicator's abort. After it, the communicator counts as
    /// [abandoned](crate::device::nccl::abandoned).
    pub abort_timeout: Duration,
    /// Use NCCL even if two ranks share a GPU. NCCL refuses that unless its environment claims that
    /// the ranks are on different hosts. For experiments.
    pub on_shared_gpus: bool,
}

#[derive(Debug)]
enum Nccl {
    Absent(String),
    Begun(NcclCommunicator),
}

impl DeviceGroup {
    /// Wraps the host group of a generation. Operations use the host path until NCCL is ready.
    #[must_use]
    pub fn new(host: HostGroup, device: Device) -> Self {
        Self {
            nccl: Nccl::Absent("NCCL was not requested".to_owned()),
            host,
            device,
            is_summing: false,
        }
    }

    /// Device of this rank.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Host group underneath.
    #[must_use]
    pub fn host(&self) -> &HostGroup {
        &self.host
    }

    /// Host group underneath, for operations on host memory.
    pub fn host_mut(&mut self) -> &mut HostGroup {
        &mut self.host
    }

    /// Agrees with all ranks on whether the group gets an NCCL communicator, and begins to create
    /// it in the background. This is a collective operation: all ranks call it at the same point,
    /// whatever their policy. A communicator from an earlier call is ended.
    ///
    /// The group continues without NCCL ([`NcclState::Absent`]) if a rank is not willing or has
    /// [abandoned](crate::device::nccl::abandoned) communicators, if versions differ, if ranks
    /// share a GPU, or if links of the group are encrypted.
    ///
    /// # Errors
    /// [`CollectiveError`] of the host group. It is not an error that NCCL cannot be used.
    pub fn begin_nccl(&mut self, policy: &NcclPolicy) -> Result<(), CollectiveError> {
        self.end_overlap();
        self.nccl = Nccl::Absent("the ranks are agreeing on NCCL".to_owned());
        let offer = match self.host.encrypted_links() {
            EncryptedLinks::All | EncryptedLinks::BetweenHosts => {
                NcclOffer::Off(UNENCRYPTED.to_owned())
            }
            EncryptedLinks::None | EncryptedLinks::NotNeeded => self.offer(policy),
        };
        let offers = self.host.gather_alongside(&offer.encode())?;
        let offers: Vec<_> = offers.iter().map(|bytes| NcclOffer::decode(bytes)).collect();
        let agreed = nccl_offer::agree(&offers);
        let (NcclPolicy::On(library, options), Ok(())) = (policy, &agreed) else {
            let reason = agreed.err().unwrap_or_else(|| "this rank is not willing".to_owned());
            self.nccl = Nccl::Absent(reason);
            return Ok(());
        };
        let mut bytes = Vec::new();
        if self.host.rank() == 0 {
            match library.unique_id() {
                Ok(id) => bytes = id.as_bytes().to_vec(),
                Err(error) => tracing::warn!(%error, "cannot create an NCCL communicator"),
            }
        }
        self.host.broadcast_bytes(0, &mut bytes)?;
        let Some(id) = crate::device::nccl::UniqueId::from_bytes(&bytes) else {
            self.nccl = Nccl::Absent("rank 0 could not create a unique id".to_owned());
            return Ok(());
        };
        let (rank, world) = (self.host.rank(), self.host.world_size());
        let init = CommInit { id, rank, world, stream: self.device.stream().clone() };
        let timeouts = Timeouts { init: options.init_timeout, abort: options.abort_timeout };
        let begun = NcclCommunicator::begin(library, init, timeouts);
        let action = "begin to create an NCCL communicator";
        self.nccl = Nccl::Begun(begun.map_err(|source| CollectiveError::Io { action, source })?);
        Ok(())
    }

    /// This rank's offer, if it may use NCCL.
    fn offer(&self, policy: &NcclPolicy) -> NcclOffer {
        if abandoned() > 0 {
            tracing::warn!("{ABANDONED}");
            return NcclOffer::Off(ABANDONED.to_owned());
        }
        NcclOffer::of(policy, &self.device)
    }

    /// Initialization state of NCCL on this rank. The call is cheap: a worker reads the state at
    /// the end of every step and reports it to the other ranks.
    #[must_use]
    pub fn nccl_state(&self) -> NcclState {
        match &self.nccl {
            Nccl::Absent(reason) => NcclState::Absent(reason.clone()),
            Nccl::Begun(communicator) => communicator.state(),
        }
    }

    /// Duration of the abort of this group's communicator, once it was aborted and the abort has
    /// returned.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn nccl_abort_time(&self) -> Option<Duration> {
        match &self.nccl {
            Nccl::Absent(_) => None,
            Nccl::Begun(communicator) => communicator.abort_time(),
        }
    }

    /// Writes the element-wise sum of all ranks' `src` to every rank's `dst`, and returns every
    /// rank's `header` in rank order. `src` is only read, so a failed step can be retried with the
    /// same contribution. All ranks get the same bits.
    ///
    /// `header`: at most [`HEADER_BYTES_MAX`] bytes. `src`, `dst`: `[len]`, the same length on
    /// every rank, on this group's device.
    ///
    /// # Errors
    /// [`CollectiveError`]; `dst` then holds unspecified values. [`CollectiveError::Device`] with
    /// [`DeviceError::Abandoned`]: NCCL still occupies the stream, so the process has to end.
    pub fn all_reduce_device<T: Element>(
        &mut self,
        header: &[u8],
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
        path: Path,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.host.check_alive()?;
        check_header(header)?;
        check_len(src.len(), dst.len(), "an all-reduce")?;
        if self.is_summing {
            let reason = "sums of parts are in progress, which `sum_rest` ends";
            return Err(CollectiveError::Invalid(reason.to_owned()));
        }
        if path == Path::Host {
            return self.sum_staged(header, src, dst);
        }
        let stream = self.device.stream().clone();
        let len = src.len();
        let ((src, _read), (dst, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        let buffers = Buffers { src, dst, len, dtype: T::DTYPE };
        self.run_nccl(header, len, Call { kind: CallKind::AllReduce, buffers, beside: None })
    }

    /// Replaces `buf` on every rank with that of rank `root`.
    ///
    /// `buf`: `[len]`, the same length on every rank, on this group's device.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device).
    pub fn broadcast_device<T: Element>(
        &mut self,
        root: usize,
        buf: &mut impl DevicePtrMut<T>,
        path: Path,
    ) -> Result<(), CollectiveError> {
        self.host.check_alive()?;
        self.check_root(root)?;
        if path == Path::Host {
            return self.broadcast_staged(root, buf);
        }
        let stream = self.device.stream().clone();
        let len = buf.len();
        let (both, _written) = buf.device_ptr_mut(&stream);
        let buffers = Buffers { src: both, dst: both, len, dtype: T::DTYPE };
        self.run_nccl(&[], len, Call { kind: CallKind::Broadcast { root }, buffers, beside: None })
            .map(drop)
    }

    /// Runs one operation over NCCL.
    fn run_nccl(
        &mut self,
        header: &[u8],
        len: usize,
        call: Call,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ready_communicator()?.call(call);
        self.finish_nccl(header, len, 1)
    }

    fn check_root(&self, root: usize) -> Result<(), CollectiveError> {
        if root < self.host.world_size() {
            return Ok(());
        }
        let reason = format!("root {root} in a group of {}", self.host.world_size());
        Err(CollectiveError::Invalid(reason))
    }

    fn ready_communicator(&self) -> Result<&NcclCommunicator, CollectiveError> {
        let Nccl::Begun(communicator) = &self.nccl else {
            return Err(CollectiveError::Invalid("this group has no NCCL communicator".to_owned()));
        };
        match communicator.state() {
            NcclState::Ready => Ok(communicator),
            // It failed since the last operation.
            NcclState::Failed(reason) => {
                let source = DeviceError::Nccl { action: "make progress", code: 0, reason };
                Err(CollectiveError::Device { source })
            }
            NcclState::Absent(_) | NcclState::Building => {
                Err(CollectiveError::Invalid("NCCL is not ready".to_owned()))
            }
        }
    }

    /// Waits for the results of the last `calls` operations, on a buffer of `len` elements. The
    /// NCCL thread moves the elements while this thread gathers the headers over the host links and
    /// then monitors these links: a closed link is the signal that a peer has ended.
    fn finish_nccl(
        &mut self,
        header: &[u8],
        len: usize,
        calls: usize,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let Nccl::Begun(communicator) = &self.nccl else {
            return Err(CollectiveError::Invalid("this group has no NCCL communicator".to_owned()));
        };
        let gathered = self.host.gather_alongside(&framed(header, len));
        let gathered = gathered.and_then(|gathered| unframed(&self.host, gathered, len));
        let done = gathered.and_then(|headers| {
            for _ in 0..calls {
                wait_for_result(&self.host, communicator)?;
            }
            Ok(headers)
        });
        done.map_err(|error| self.stop_nccl(error))
    }

    /// Ends the group after a failed operation over NCCL, and waits until the operation has left
    /// the device's stream. NCCL releases the communicator in the background. Returns `Abandoned`
    /// if the work on the stream does not end.
    fn stop_nccl(&mut self, error: CollectiveError) -> CollectiveError {
        self.host.fail();
        self.is_summing = false;
        let Nccl::Begun(communicator) = &self.nccl else { return error };
        communicator.abort(&error.to_string());
        match communicator.wait_until_clear() {
            Ok(()) => error,
            Err(source) => {
                // Releasing the device would wait for the work that hangs; the end of the process
                // does not.
                std::mem::forget(self.device.clone());
                CollectiveError::Device { source }
            }
        }
    }
}

fn wait_for_result(
    host: &HostGroup,
    communicator: &NcclCommunicator,
) -> Result<(), CollectiveError> {
    let mut spin_wait = SpinWait::for_nccl();
    let mut lost_neighbour: Option<(Instant, CollectiveError)> = None;
    loop {
        if let Some(result) = communicator.result() {
            return result.map_err(|source| CollectiveError::Device { source });
        }
        if lost_neighbour.is_none() && spin_wait.should_spin() {
            continue;
        }
        let left = match &lost_neighbour {
            None => POLL_INTERVAL_MAX,
            Some((since, _)) => LEAVE_GRACE_TIME.saturating_sub(since.elapsed()),
        };
        if left.is_zero()
            && let Some((_, error)) = lost_neighbour
        {
            return Err(error);
        }
        if lost_neighbour.is_some() {
            std::thread::sleep(left.min(Duration::from_micros(100)));
        } else if let WaitOutcome::NeighbourGone(error) =
            host.wait_alongside(communicator.finished(), left)?
        {
            // The neighbour may have left because the operation is complete; then it completes here
            // soon.
            lost_neighbour = Some((Instant::now(), error));
        }
    }
}

impl NcclPolicy {
    /// Uses the system's NCCL with default options, if there is one.
    #[must_use]
    pub fn auto() -> Self {
        match Library::find() {
            Ok(library) => Self::On(library, NcclOptions::default()),
            Err(error) => Self::Off(error.to_string()),
        }
    }

    /// Uses the NCCL library in this file, with default options.
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
            init_timeout: Duration::from_secs(60),
            abort_timeout: Duration::from_secs(30),
            on_shared_gpus: false,
        }
    }
}

impl Drop for DeviceGroup {
    /// Keeps the links open: a rank that leaves after the last operation may be ahead of other
    /// ranks, which are still in NCCL's last all-reduce and would take a closed link for a lost
    /// peer.
    fn drop(&mut self) {
        self.end_overlap();
        if self.nccl_state() == NcclState::Ready && self.host.check_alive().is_ok() {
            let links = self.host.shared_links();
            let hold = move || linger(&links);
            // If no thread can be started, the links close now.
            let _ = std::thread::Builder::new().name("ring-linger".to_owned()).spawn(hold);
        }
    }
}

/// Waits until a neighbour has sent a byte of the next operation or has closed its link, or for
/// [`LINGER_TIME_MAX`]; then for [`LINGER_TIME`], in which the other ranks complete the operation.
fn linger(links: &[Arc<Link>]) {
    let flags = PollFlags::IN | PollFlags::RDHUP;
    let mut fds: Vec<_> = links.iter().map(|link| PollFd::new(&**link, flags)).collect();
    let deadline = Instant::now().checked_add(LINGER_TIME_MAX);
    if poll_until(&mut fds, deadline).is_ok() {
        std::thread::sleep(LINGER_TIME);
    }
}

/// Prefixes a header with the length of the buffer. NCCL carries the elements, so the host group
/// cannot compare the lengths itself.
fn framed(header: &[u8], len: usize) -> Vec<u8> {
    [&(len as u64).to_le_bytes(), header].concat()
}

fn unframed(
    host: &HostGroup,
    gathered: Vec<Vec<u8>>,
    len: usize,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let unframe = |(rank, mut framed): (usize, Vec<u8>)| {
        let its = framed.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if its != Some(len as u64) {
            let its = its.map_or_else(|| "none".to_owned(), |its| its.to_string());
            let reason = format!("expected a buffer length of {len} elements, got {its}");
            return Err(host.protocol_error(rank, reason));
        }
        framed.drain(..FRAMING_BYTES);
        Ok(framed)
    };
    gathered.into_iter().enumerate().map(unframe).collect()
}

fn check_header(header: &[u8]) -> Result<(), CollectiveError> {
    if header.len() <= HEADER_BYTES_MAX {
        return Ok(());
    }
    let reason = format!("a header of {} bytes; the limit is {HEADER_BYTES_MAX}", header.len());
    Err(CollectiveError::Invalid(reason))
}

fn check_len(src: usize, dst: usize, what: &str) -> Result<(), CollectiveError> {
    if src == dst {
        return Ok(());
    }
    Err(CollectiveError::Invalid(format!("a source of {src} elements for {what} of {dst}")))
}

/// Largest header of an all-reduce on device memory, in bytes.
pub const HEADER_BYTES_MAX: usize = BLOCK_BYTES_MAX - FRAMING_BYTES;

const FRAMING_BYTES: usize = size_of::<u64>();

/// Why a group whose links are encrypted does not use NCCL, whose connections are its own.
const UNENCRYPTED: &str = "the links are encrypted, and NCCL's would not be; --link-encryption off \
                           allows it";

/// Why a process uses no NCCL any more.
const ABANDONED: &str = "an NCCL communicator of this process was not released in time; the \
                         process uses NCCL no more";

/// Grace period of NCCL after a neighbour has closed its links: a neighbour that leaves after an
/// operation has contributed to it.
const LEAVE_GRACE_TIME: Duration = Duration::from_millis(20);

/// How long links stay open once a neighbour is known to have completed the last operation: far
/// longer than the ranks' skew at the end of an all-reduce.
const LINGER_TIME: Duration = Duration::from_millis(250);

/// How long links stay open while nothing is known about the neighbours: longer than a rank waits
/// for a processor on a busy machine.
const LINGER_TIME_MAX: Duration = Duration::from_secs(5);

/// Upper limit of one wait. The fence, the links and the NCCL thread wake the wait earlier; the
/// limit is a safeguard.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(1);
