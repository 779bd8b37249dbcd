//! The links of a worker to its peers. The methods are those of the types of the same purpose in
//! `elasticdl-collective`, which implement them.

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use elasticdl_collective::device::Path;
use elasticdl_collective::{
    CollectiveError, Communicator, EncryptedLinks, Endpoint, FetchError, GroupSpec, HostGroup,
    Member, Position, StateLink, StateMessageHeader, StateReceiver, StateRequest, StateSender,
};

use crate::session::transport_switch::NcclBuild;

/// The links of a worker: [`Endpoint`].
pub trait Links: Debug {
    /// Builds the group of one generation within `deadline`.
    ///
    /// # Errors
    /// [`CollectiveError`]; no link of the attempt stays open.
    fn connect(
        &self,
        group: &GroupSpec,
        deadline: Duration,
    ) -> Result<Box<dyn Group>, CollectiveError>;

    /// Returns the next joiner that requests this worker's state. Never blocks.
    fn next_request(&self) -> Option<Box<dyn Request>>;

    /// Dials `donor` for its state, within `limit`. `idle_timeout`: limit of the donor's silence
    /// once the transfer has begun. `position`: of an earlier fetch whose link broke.
    ///
    /// # Errors
    /// [`FetchError`].
    fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<Box<dyn Receiver>, FetchError>;
}

/// The group of one generation on host memory: [`HostGroup`].
pub trait Group: Communicator + Debug {
    /// The group, if its operations may run on another thread.
    fn host_mut(&mut self) -> Option<&mut HostGroup>;

    /// The group, if it can be that of a worker with a GPU.
    fn into_host(self: Box<Self>) -> Option<HostGroup>;

    /// Describes the transport of sums between hosts.
    fn describe(&self) -> String;

    /// Whether some operations take the time of a network. All ranks find the same, between the
    /// same two operations.
    fn spans_hosts(&self) -> bool;

    /// As [`Communicator::all_reduce`], over `path`.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn sum(
        &mut self,
        _path: Path,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.all_reduce(header, src, dst)
    }

    /// Starts to build NCCL. A collective operation of the group.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn begin_nccl(&mut self) -> Result<(), CollectiveError> {
        Err(CollectiveError::Invalid("this worker has no group of GPUs".into()))
    }

    /// The state of the group's NCCL communicator on this rank; `None` without a GPU.
    fn nccl(&self) -> Option<NcclBuild> {
        None
    }
}

/// The request of a joiner for the state: [`StateRequest`].
pub trait Request: Debug + Send {
    /// Id of the joiner.
    fn member(&self) -> u64;

    /// Handle to close the link from any thread.
    fn link(&self) -> Box<dyn RequestLink>;

    /// Begins to serve the request. `idle_timeout`: limit of the joiner's silence.
    fn serve(self: Box<Self>, idle_timeout: Duration) -> Box<dyn Sender>;
}

/// Handle to the link of a joiner: [`StateLink`].
pub trait RequestLink: Debug {
    /// Closes the link.
    fn shut_down(&self);
}

/// Donor's end of a state transfer: [`StateSender`]. Its calls block.
pub trait Sender {
    /// Waits for the joiner's first position; `None` if it has no data.
    ///
    /// # Errors
    /// The link's.
    fn first_position(&mut self) -> io::Result<Option<Position>>;

    /// Returns the joiner's last position.
    ///
    /// # Errors
    /// The link's.
    fn position(&mut self) -> io::Result<Option<Position>>;

    /// Sends one message.
    ///
    /// # Errors
    /// The link's.
    fn send(&mut self, kind: u32, generation: u64, note: &[u8], floats: &[f32]) -> io::Result<()>;

    /// Sends a heartbeat.
    ///
    /// # Errors
    /// The link's.
    fn heartbeat(&mut self) -> io::Result<()>;

    /// Waits until the joiner has received everything and closed the link.
    fn finish(self: Box<Self>);
}

/// Joiner's end of a state transfer: [`StateReceiver`].
pub trait Receiver: Debug {
    /// Id of the donor.
    fn donor(&self) -> u64;

    /// Reports the position of this joiner to the donor. Never blocks.
    fn report(&self, position: Position);

    /// Returns the header of the next message, if it arrives within `wait`.
    ///
    /// # Errors
    /// The link's.
    fn next(&mut self, wait: Duration) -> io::Result<Option<StateMessageHeader>>;

    /// Reads the next floats of the current message.
    ///
    /// # Errors
    /// The link's.
    fn take(&mut self, buf: &mut [f32]) -> io::Result<()>;
}

impl Links for Endpoint {
    fn connect(
        &self,
        group: &GroupSpec,
        deadline: Duration,
    ) -> Result<Box<dyn Group>, CollectiveError> {
        Ok(Box::new(self.connect(group, deadline)?))
    }

    fn next_request(&self) -> Option<Box<dyn Request>> {
        Some(Box::new(self.next_state_request()?))
    }

    fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<Box<dyn Receiver>, FetchError> {
        Ok(Box::new(self.fetch(donor, limit, idle_timeout, position)?))
    }
}

impl Group for HostGroup {
    fn host_mut(&mut self) -> Option<&mut HostGroup> {
        Some(self)
    }

    fn into_host(self: Box<Self>) -> Option<HostGroup> {
        Some(*self)
    }

    fn spans_hosts(&self) -> bool {
        self.world_size() > 1 && !self.shares_memory()
    }

    fn describe(&self) -> String {
        let host = match self {
            group if group.shares_memory() => "shared memory",
            group if group.is_hierarchical() => "shared memory inside hosts and TCP between them",
            _ => "TCP",
        };
        let digests = self.has_digests() && !self.shares_memory();
        match self.encrypted_links() {
            EncryptedLinks::All => format!("{host}, links encrypted"),
            EncryptedLinks::BetweenHosts => format!("{host}, links between hosts encrypted"),
            EncryptedLinks::None if digests => {
                format!("{host}, links not encrypted, with digests")
            }
            EncryptedLinks::None => format!("{host}, links not encrypted"),
            EncryptedLinks::NotNeeded if digests => format!("{host}, links with digests"),
            EncryptedLinks::NotNeeded => host.to_owned(),
        }
    }
}

impl Request for StateRequest {
    fn member(&self) -> u64 {
        self.member()
    }

    fn link(&self) -> Box<dyn RequestLink> {
        Box::new(self.link())
    }

    fn serve(self: Box<Self>, idle_timeout: Duration) -> Box<dyn Sender> {
        Box::new((*self).serve(idle_timeout))
    }
}

impl RequestLink for StateLink {
    fn shut_down(&self) {
        self.shut_down();
    }
}

impl Sender for StateSender {
    fn first_position(&mut self) -> io::Result<Option<Position>> {
        self.first_position()
    }

    fn position(&mut self) -> io::Result<Option<Position>> {
        self.position()
    }

    fn send(&mut self, kind: u32, generation: u64, note: &[u8], floats: &[f32]) -> io::Result<()> {
        self.send(kind, generation, note, &[floats])
    }

    fn heartbeat(&mut self) -> io::Result<()> {
        self.heartbeat()
    }

    fn finish(self: Box<Self>) {
        (*self).finish();
    }
}

impl Receiver for StateReceiver {
    fn donor(&self) -> u64 {
        self.donor()
    }

    fn report(&self, position: Position) {
        self.report(position);
    }

    fn next(&mut self, wait: Duration) -> io::Result<Option<StateMessageHeader>> {
        self.next(wait)
    }

    fn take(&mut self, buf: &mut [f32]) -> io::Result<()> {
        self.take(buf)
    }
}
