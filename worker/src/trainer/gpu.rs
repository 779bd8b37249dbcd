//! What the trainer does with a GPU: builds NCCL beside the steps, and says what became of it.

use elasticdl_collective::device::{DeviceError, NcclPolicy, Path};
use elasticdl_collective::nccl::NcclState;
use elasticdl_collective::{CollectiveError, Communicator as _};

use super::{Stopped, Trainer, ring};
use crate::core::transport_switch::{NcclBuild, NcclObstacle, Transport};
use crate::device::DeviceModel;
use crate::failure::Failure;
use crate::messages::ToMaster;
use crate::model::{Model, UserError};
use crate::ring::Ring;

impl<M: Model> Trainer<'_, M> {
    /// Begins to build NCCL, where all ranks find that they should. An operation of the group.
    pub(super) fn begin_nccl(&mut self) -> Result<(), Stopped> {
        if self.session.nccl_obstacle().is_none() {
            let ring = ring(&mut self.ring)?.device().map_err(Stopped::Broken)?;
            ring.begin_nccl(&self.nccl).map_err(Stopped::Broken)?;
        }
        Ok(())
    }

    /// Has the session know how far NCCL is, and learns what carries the next step.
    pub(super) fn path(&mut self) -> Path {
        if let Some(Ring::Device(ring)) = &self.ring {
            self.session.set_nccl_build(match ring.nccl_state() {
                NcclState::Absent(_) => NcclBuild::Absent,
                NcclState::Building => NcclBuild::Building,
                NcclState::Failed(_) => NcclBuild::Failed,
                NcclState::Ready => NcclBuild::Ready,
            });
        }
        match self.session.transport() {
            Transport::Host => Path::Host,
            Transport::Nccl => Path::Nccl,
        }
    }

    /// Has the master know what the step's sum went over, if it was something else the last time.
    pub(super) fn report_transport(&mut self, path: Path) {
        let (Some((generation, 0)), Some(ring)) = (self.session.group_rank(), &self.ring) else {
            return;
        };
        let what = describe_transport(ring, path, self.session.nccl_obstacle(), &self.nccl);
        if self.allreduce_transport.as_ref() != Some(&what) {
            self.allreduce_transport = Some(what.clone());
            self.outbox.send(ToMaster::AllreduceTransport { generation, what });
        }
    }

    /// Tells what has failed with the links, or on the GPU: what NCCL does, the host ring can do,
    /// but without a GPU this worker can't go on.
    pub(super) fn classify(&mut self, error: CollectiveError) -> Result<CollectiveError, Failure> {
        match error {
            CollectiveError::Device { source: DeviceError::Nccl { .. } } => {
                self.session.nccl_broke();
                Ok(error)
            }
            // It failed between this rank's word and the step.
            CollectiveError::Invalid(_) if self.session.transport() == Transport::Nccl => {
                self.session.nccl_broke();
                Ok(error)
            }
            CollectiveError::Device { source } => Err(source.into()),
            error => Ok(error),
        }
    }
}

/// NCCL where it is found, unless the user has another word: `off`, or a file.
pub(super) fn nccl_policy() -> NcclPolicy {
    match std::env::var_os("ELASTICDL_NCCL") {
        None => NcclPolicy::auto(),
        Some(word) if word == "off" => NcclPolicy::Off("ELASTICDL_NCCL is off".into()),
        Some(file) => NcclPolicy::from_file(std::path::Path::new(&file)),
    }
}

/// What a step's sum went over, in words.
fn describe_transport(
    ring: &Ring,
    path: Path,
    obstacle: Option<NcclObstacle>,
    policy: &NcclPolicy,
) -> String {
    if ring.host().world_size() == 1 {
        return "nothing, there is one worker".into();
    }
    let host = match ring.host() {
        ring if ring.shares_memory() => "shared memory",
        ring if ring.is_hierarchical() => "shared memory inside hosts and TCP between them",
        _ => "TCP",
    };
    let Ring::Device(ring) = ring else { return host.into() };
    let why = match (path, policy, obstacle, ring.nccl_state()) {
        (Path::Nccl, NcclPolicy::On(library, _), ..) => {
            let version = library.version();
            return format!("NCCL {}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        }
        (.., Some(NcclObstacle::GivenUp(times)), _) => {
            format!("NCCL is given up, it failed in {times} generations")
        }
        (.., NcclState::Failed(reason)) => format!("NCCL failed: {reason}"),
        (.., NcclState::Absent(reason)) => format!("no NCCL: {reason}"),
        (.., NcclState::Building | NcclState::Ready) => "NCCL is being built".into(),
    };
    format!("{host}, from GPUs by way of the hosts' memory; {why}")
}

/// The model on the GPU that it said it computes on.
pub(super) fn device_of<M: Model>(
    model: &mut M,
) -> Result<&mut dyn DeviceModel<Batch = M::Batch>, UserError> {
    model.device().ok_or_else(|| "device() has given a GPU once, and now gives none".into())
}
