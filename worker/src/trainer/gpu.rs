//! GPU support of the trainer: it builds NCCL during the steps, reports the transport, and begins
//! updates.

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{DeviceError, NcclPolicy, Path};
use elasticdl_collective::nccl::NcclState;
use elasticdl_proto::WorkerMessage;

use super::Trainer;
use super::device::optimizer_of;
use super::stopped::Stopped;
use crate::descriptors;
use crate::failure::Failure;
use crate::model::Model;
use crate::session::header::StepHeader;
use crate::session::transport_switch::{NcclObstacle, Transport};
use crate::tensors::Tensors;

impl<M: Model> Trainer<'_, M> {
    /// Starts to build NCCL. A collective operation of the group.
    pub(super) fn build_nccl(&mut self) -> Result<(), Stopped> {
        self.tensors.begin_nccl()?;
        self.session.nccl_started();
        Ok(())
    }

    /// Passes the state of NCCL to the session, and returns the transport of the next step.
    pub(super) fn path(&mut self) -> Path {
        if let Some(build) = self.tensors.nccl_build() {
            self.session.set_nccl_build(build);
        }
        match self.session.transport() {
            Transport::Host => Path::Host,
            Transport::Nccl => Path::Nccl,
        }
    }

    /// Enqueues the update on a GPU, where it changes nothing if the sum is not finite: the GPU
    /// does not wait until the host knows. Returns whether it has, which is only if the step will
    /// be committed or its sum is not finite.
    pub(super) fn begin_update(&mut self, headers: &[StepHeader]) -> Result<bool, Stopped> {
        let Tensors::Device { state, .. } = &mut self.tensors else { return Ok(false) };
        let optimizer = optimizer_of(&mut self.model, &*self.rule);
        let Some((optimizer, records)) = optimizer.zip(self.session.records_to_apply(headers))
        else {
            return Ok(false);
        };
        state.update_if_finite((self.session.step(), records), &optimizer)?;
        Ok(true)
    }

    /// Reports the transport of the step's all-reduce to the master: once per generation, because
    /// the master ignores a report about a generation that it has replaced, and when it changes.
    pub(super) fn report_transport(&mut self, path: Path) {
        let Some((generation, 0)) = self.session.group_rank() else { return };
        let what = describe_transport(&self.tensors, path, self.session.nccl_obstacle());
        let Some(what) = what else { return };
        let report = (generation, what);
        if self.allreduce_transport.as_ref() != Some(&report) {
            let (generation, what) = report.clone();
            self.allreduce_transport = Some(report);
            self.outbox.send(WorkerMessage::AllreduceTransport { generation, what });
        }
    }

    /// Separates failures of links and of NCCL from other failures of the GPU and of this process.
    /// The host ring can replace NCCL, but without a GPU this worker cannot continue.
    pub(super) fn classify(&mut self, error: CollectiveError) -> Result<CollectiveError, Failure> {
        match error {
            CollectiveError::Device { source: DeviceError::Nccl { .. } } => {
                self.session.nccl_broke();
                Ok(error)
            }
            // NCCL failed after this rank had sent its header and before the step.
            CollectiveError::Invalid(_) if self.session.transport() == Transport::Nccl => {
                self.session.nccl_broke();
                Ok(error)
            }
            CollectiveError::Device { source } => Err(source.into()),
            // Links that other workers can build, and this one can't. A state would be lost, so a
            // worker that has one tries again.
            CollectiveError::Io { source, .. }
                if !self.session.has_trained() && descriptors::is_out_of_descriptors(&source) =>
            {
                Err(Failure::local(format!("this process can't open a link: {source}")))
            }
            error => Ok(error),
        }
    }
}

/// Describes the transport of a step's all-reduce in the worker's group.
fn describe_transport(
    tensors: &Tensors,
    path: Path,
    obstacle: Option<NcclObstacle>,
) -> Option<String> {
    let group = tensors.group()?;
    if group.world_size() == 1 {
        return Some("none: one worker".into());
    }
    let host = group.describe();
    let Tensors::Device { group: Some(group), nccl, .. } = tensors else {
        let is_on_gpu = tensors.is_on_gpu();
        return Some(if is_on_gpu { format!("{host}, from GPUs by {HOSTS}") } else { host });
    };
    let why = match (path, nccl, obstacle, group.nccl_state()) {
        (Path::Nccl, NcclPolicy::On(library, _), ..) => {
            let version = library.version();
            let (major, minor) = (version / 10_000, version / 100 % 100);
            return Some(format!("NCCL {major}.{minor}.{}", version % 100));
        }
        (.., Some(NcclObstacle::GivenUp(times)), _) => {
            format!("NCCL is off, it failed in {times} generations")
        }
        (.., NcclState::Failed(reason)) => format!("NCCL failed: {reason}"),
        (.., NcclState::Absent(reason)) => format!("no NCCL: {reason}"),
        (.., NcclState::Building | NcclState::Ready) => "NCCL is being built".into(),
    };
    Some(format!("{host}, from GPUs by way of the hosts' memory; {why}"))
}

/// Where gradients are summed with `--shard-optimizer`.
const HOSTS: &str = "way of the hosts' memory, where --shard-optimizer has the optimizer's state";
