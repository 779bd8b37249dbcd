//! The large buffers of a worker, which are parameters, optimizer state and gradients, and the
//! group that sums them over its ranks.

use std::sync::Arc;

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{DeviceError, DeviceGroup, NcclPolicy, Path};
use elasticdl_collective::nccl::NcclState;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64, xxh3_64_with_seed};

use crate::buckets::{self, SummedBuckets};
use crate::device::DeviceState;
use crate::digests::{digest_of, digest_of_rest, digest_without_slots, update_with_progress};
use crate::machine::Group;
use crate::session::State;
use crate::session::transport_switch::NcclBuild;
use crate::state_buffer::{Copying, StateBuffer, StateMemory, writable, zeros};
use crate::tensor::{ModelSize, Tensor, window};
use crate::update::Update;

/// The buffers, in the memory where the model computes, and the group whose operations reach them.
#[derive(Debug)]
pub(crate) enum Tensors {
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "there are no GPUs"))]
    Device {
        /// Dropped before the buffers, which its operations may still use.
        group: Option<Box<DeviceGroup>>,
        state: Box<DeviceState>,
        /// Whether this worker would use NCCL.
        nccl: NcclPolicy,
    },
    /// The model may compute on a GPU, with a [copy](HostState::gpu) of the parameters.
    Host { group: Option<Box<dyn Group>>, state: HostState },
}

/// The buffers on the host. Each has one `f32` per parameter, apart from `slots`.
/// Joining workers are sent copies of the state and of the shared buffer (`Arc`). A write to a
/// buffer that is still being sent goes to a fresh copy (copy-on-write).
#[derive(Debug)]
pub(crate) struct HostState {
    pub(crate) parameters: StateBuffer,
    /// Optimizer state: `[slots · parameters]`, and what a program has beside it. If it is divided
    /// over the group, the latter alone.
    pub(crate) slots: StateBuffer,
    /// This worker's gradient, summed over its records of the step. No all-reduce writes to it.
    /// `[parameters]`, also if a model has these in bf16 and `parameters` is empty.
    pub(crate) gradient: Vec<f32>,
    /// All-reduced gradient of the last committed step, retained for ranks that are one step
    /// behind.
    pub(crate) retained: Arc<Vec<f32>>,
    /// Destination of the next all-reduced gradient.
    pub(crate) reduced: Vec<f32>,
    /// Gradients of earlier steps that are still being sent to joining workers. Their memory is
    /// used again, because new pages cost the whole group time.
    lent: Vec<Arc<Vec<f32>>>,
    /// Where the model computes, if it does so on a GPU: then this gradient is a copy of that
    /// there, and the parameters there are a copy of these.
    gpu: Option<GpuCopy>,
}

/// The buffers where a model computes.
#[derive(Debug)]
pub(crate) enum Place<'a> {
    Gpu(&'a mut DeviceState),
    Host(&'a mut HostState),
}

/// The parameters and the gradient in the memory of a GPU. The state is on the host.
#[derive(Debug)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "there are no GPUs"))]
struct GpuCopy {
    buffers: Box<DeviceState>,
    /// [Version](StateBuffer::version) of the parameters that are there.
    version: Option<u64>,
}

impl Tensors {
    /// The worker's group, while it has one.
    pub(crate) fn group(&self) -> Option<&dyn Group> {
        match self {
            Self::Device { group, .. } => group.as_ref().map(|group| group.host() as &dyn Group),
            Self::Host { group, .. } => group.as_deref(),
        }
    }

    /// The worker's group, for operations on host memory.
    ///
    /// # Errors
    /// The worker has no group any more.
    pub(crate) fn group_mut(&mut self) -> Result<&mut dyn Group, CollectiveError> {
        match self {
            Self::Device { group, .. } => Ok(member_of(group)?.host_mut()),
            Self::Host { group, .. } => Ok(&mut **member_of(group)?),
        }
    }

    /// Enters a group, or leaves the one that the worker is in.
    pub(crate) fn set_group(&mut self, new: Option<Box<dyn Group>>) {
        match self {
            Self::Device { group, state, .. } => {
                let new = new.and_then(Group::into_host);
                *group = new.map(|new| Box::new(DeviceGroup::new(new, state.device().clone())));
            }
            Self::Host { group, .. } => *group = new,
        }
    }

    /// Starts to build NCCL. A collective operation of the group.
    pub(crate) fn begin_nccl(&mut self) -> Result<(), CollectiveError> {
        match self {
            Self::Device { group, nccl, .. } => member_of(group)?.begin_nccl(nccl),
            // The sums are where the optimizer's state is.
            Self::Host { state, .. } if state.is_on_gpu() => Ok(()),
            Self::Host { group, .. } => member_of(group)?.begin_nccl(),
        }
    }

    /// The state of NCCL on this rank; `None` without a GPU or a group.
    pub(crate) fn nccl_build(&self) -> Option<NcclBuild> {
        match self {
            Self::Device { group, .. } => Some(match group.as_ref()?.nccl_state() {
                NcclState::Absent(_) => NcclBuild::Absent,
                NcclState::Building => NcclBuild::Building,
                NcclState::Failed(_) => NcclBuild::Failed,
                NcclState::Ready => NcclBuild::Ready,
            }),
            Self::Host { group, .. } => group.as_ref()?.nccl(),
        }
    }

    /// Whether the model computes on a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        match self {
            Self::Device { .. } => true,
            Self::Host { state, .. } => state.is_on_gpu(),
        }
    }

    /// The buffers where the model computes, with the parameters as they are.
    pub(crate) fn place(&mut self) -> Result<Place<'_>, DeviceError> {
        match self {
            Self::Device { state, .. } => Ok(Place::Gpu(state)),
            Self::Host { state, .. } => state.place(),
        }
    }

    /// The gradient of this worker's records is complete: copies it from the GPU where it was
    /// computed to where it is summed, if that is the host.
    pub(crate) fn end_gradient(&mut self) -> Result<(), DeviceError> {
        match self {
            Self::Host { state: HostState { gpu: Some(gpu), gradient, .. }, .. } => {
                gpu.buffers.gradient_to_host(gradient)
            }
            Self::Device { .. } | Self::Host { .. } => Ok(()),
        }
    }

    pub(crate) fn size(&self) -> ModelSize {
        match self {
            Self::Device { state, .. } => state.size(),
            Self::Host { state, .. } => {
                ModelSize { parameters: state.gradient.len(), slots: state.slots.len() }
            }
        }
    }

    /// The tensor on the host; a copy, if it is on a GPU.
    pub(crate) fn to_host(&self, tensor: Tensor) -> Result<Arc<Vec<f32>>, DeviceError> {
        Ok(match (self, tensor) {
            (Self::Device { state, .. }, tensor) => state.to_host(tensor)?,
            (Self::Host { state, .. }, Tensor::Retained) => Arc::clone(&state.retained),
            (Self::Host { state, .. }, Tensor::Parameters) => state.parameters.snapshot(),
            (Self::Host { state, .. }, Tensor::Reduced) => Arc::new(state.reduced.clone()),
            (Self::Host { state, .. }, Tensor::Slots) => state.slots.snapshot(),
        })
    }

    /// Starts to copy the parameters and the optimizer state to memory of their lengths.
    pub(crate) fn copy_state_to(
        &self,
        [parameters, slots]: [Vec<f32>; 2],
    ) -> Result<[Copying; 2], DeviceError> {
        if let Self::Host { state, .. } = self {
            return Ok([state.parameters.copy_to(parameters), state.slots.copy_to(slots)]);
        }
        let copy_to = |tensor, to| Ok(Copying::Later { from: self.to_host(tensor)?, to });
        Ok([copy_to(Tensor::Parameters, parameters)?, copy_to(Tensor::Slots, slots)?])
    }

    /// Calls `fill` to overwrite the parameters and the optimizer state.
    pub(crate) fn fill_state<T, E: From<DeviceError>>(
        &mut self,
        fill: impl FnOnce(&mut [f32], &mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        let ModelSize { parameters, slots } = self.size();
        match self {
            Self::Device { state, .. } => {
                let (mut parameters, mut slots) = (vec![0.0; parameters], vec![0.0; slots]);
                let filled = fill(&mut parameters, &mut slots)?;
                state.load(Tensor::Parameters, &parameters)?;
                state.load(Tensor::Slots, &slots)?;
                Ok(filled)
            }
            Self::Host { state, .. } => {
                let HostState { parameters, slots, gradient, .. } = state;
                fill(HostState::created(parameters, gradient), slots.writable())
            }
        }
    }

    /// Calls `fill` to overwrite `len` floats of the state, which is the parameters followed by the
    /// optimizer state, starting at float `from`. The range must lie within one of the two.
    pub(crate) fn fill_part<E: From<DeviceError>>(
        &mut self,
        from: usize,
        len: usize,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (tensor, at) = match from.checked_sub(self.size().parameters) {
            None => (Tensor::Parameters, from),
            Some(at) => (Tensor::Slots, at),
        };
        match (self, tensor) {
            (Self::Device { state, .. }, tensor) => {
                let mut floats = vec![0.0; len];
                fill(&mut floats)?;
                Ok(state.load_at(tensor, at, &floats)?)
            }
            (Self::Host { state, .. }, Tensor::Slots) => {
                fill(&mut state.slots.writable()[at..at + len])
            }
            (Self::Host { state, .. }, _) => fill(&mut state.parameters.writable()[at..at + len]),
        }
    }

    /// Calls `fill` to overwrite the reduced gradient.
    pub(crate) fn fill_reduced<E: From<DeviceError>>(
        &mut self,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Self::Device { state, .. } => {
                let mut reduced = vec![0.0; state.size().parameters];
                fill(&mut reduced)?;
                Ok(state.load(Tensor::Reduced, &reduced)?)
            }
            Self::Host { state, .. } => fill(&mut state.reduced),
        }
    }

    pub(crate) fn clear_gradient(&mut self) -> Result<(), DeviceError> {
        match self {
            Self::Device { state, .. } => state.clear_gradient(),
            Self::Host { state, .. } => {
                state.gradient.fill(0.0);
                state.gpu.as_mut().map_or(Ok(()), |gpu| gpu.buffers.clear_gradient())
            }
        }
    }

    /// All-reduces the gradient into `reduced` and gathers the headers of all ranks along with it.
    /// `buckets`: for a model that uses buckets.
    pub(crate) fn sum(
        &mut self,
        header: &[u8],
        path: Path,
        buckets: Option<SummedBuckets>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        // A group of one: the local gradient is the sum, and no other rank needs it again, so the
        // buffers are swapped.
        let is_alone = self.group_mut()?.world_size() == 1;
        match self {
            Self::Device { state, .. } if is_alone => {
                state.take_gradient_as_sum().map_err(|source| CollectiveError::Device { source })?
            }
            Self::Device { group, state, .. } => {
                return state.sum(member_of(group)?, header, path, buckets);
            }
            Self::Host { state, .. } if is_alone => {
                std::mem::swap(&mut state.gradient, &mut state.reduced)
            }
            Self::Host { group, state: HostState { gradient, reduced, .. } } => {
                let group = &mut **member_of(group)?;
                return match buckets {
                    Some(buckets) => buckets::sum_rest(group, header, gradient, reduced, buckets),
                    None => group.sum(path, header, gradient, reduced),
                };
            }
        }
        Ok(vec![header.to_vec()])
    }

    /// The [sum](Self::sum) is not committed, because some records of the step are missing: the
    /// gradient of a group of one is pending again.
    pub(crate) fn keep_gradient(&mut self) -> Result<(), DeviceError> {
        let is_alone = self.group().is_some_and(|group| group.world_size() == 1);
        match self {
            Self::Device { state, .. } if is_alone => state.take_gradient_as_sum()?,
            Self::Host { state, .. } if is_alone => {
                std::mem::swap(&mut state.gradient, &mut state.reduced)
            }
            Self::Device { .. } | Self::Host { .. } => {}
        }
        Ok(())
    }

    /// Whether every element of the reduced gradient is finite.
    pub(crate) fn sum_is_finite(&mut self) -> Result<bool, DeviceError> {
        self.begin_sum_check()?;
        self.end_sum_check()
    }

    /// Begins to compute what [`end_sum_check`](Self::end_sum_check) will return, on a GPU.
    pub(crate) fn begin_sum_check(&mut self) -> Result<(), DeviceError> {
        match self {
            Self::Device { state, .. } => state.begin_sum_check(),
            Self::Host { .. } => Ok(()),
        }
    }

    /// See [`sum_is_finite`](Self::sum_is_finite).
    pub(crate) fn end_sum_check(&self) -> Result<bool, DeviceError> {
        match self {
            Self::Device { state, .. } => state.end_sum_check(),
            Self::Host { state, .. } => Ok(is_finite(&state.reduced)),
        }
    }

    /// Like [`sum_is_finite`](Self::sum_is_finite), for this worker's own gradient, which is the
    /// sum in a group of one.
    pub(crate) fn gradient_is_finite(&mut self) -> Result<bool, DeviceError> {
        match self {
            Self::Device { state, .. } => state.gradient_is_finite(),
            Self::Host { state, .. } => Ok(is_finite(&state.gradient)),
        }
    }

    /// Like [`sum_is_finite`](Self::sum_is_finite), for the parameters.
    pub(crate) fn parameters_are_finite(&mut self) -> Result<bool, DeviceError> {
        match self {
            Self::Device { state, .. } => state.parameters_are_finite(),
            Self::Host { state, .. } => Ok(is_finite(&state.parameters)),
        }
    }

    /// Replaces the tensor on every rank with that of rank `root`.
    pub(crate) fn broadcast(&mut self, root: usize, tensor: Tensor) -> Result<(), CollectiveError> {
        let (group, state) = match self {
            Self::Device { group, state, .. } => {
                return state.broadcast(member_of(group)?, root, tensor);
            }
            Self::Host { group, state } => (member_of(group)?, state),
        };
        let buffer = match tensor {
            Tensor::Retained => writable(&mut state.retained),
            Tensor::Parameters => HostState::created(&mut state.parameters, &mut state.gradient),
            Tensor::Reduced => &mut state.reduced,
            Tensor::Slots => state.slots.writable(),
        };
        group.broadcast(root, buffer)
    }

    /// Retains the sum in `reduced`, which the last commit applied, and frees `reduced` for the
    /// next step. `is_alone`: in a group of one.
    pub(crate) fn retain_reduced(&mut self, is_alone: bool) -> Result<(), DeviceError> {
        match self {
            Self::Device { state, .. } => state.retain_reduced(is_alone),
            Self::Host { state, .. } => {
                state.retain_reduced();
                Ok(())
            }
        }
    }

    /// Digest of the parameters, the optimizer state and the ledger.
    pub(crate) fn digest(&self, state: &State) -> Result<u64, DeviceError> {
        match self {
            Self::Device { .. } => {
                let parameters = self.to_host(Tensor::Parameters)?;
                let slots = self.to_host(Tensor::Slots)?;
                Ok(digest_of(&parameters, &slots, state))
            }
            Self::Host { state: HostState { parameters, slots, .. }, .. } => {
                Ok(digest_of(parameters, slots, state))
            }
        }
    }

    /// As [`digest`](Self::digest), without the optimizer state that is divided over the workers.
    pub(crate) fn digest_beside_chunks(&self, state: &State) -> Result<u64, DeviceError> {
        let parameters = self.to_host(Tensor::Parameters)?;
        let whole = self.to_host(Tensor::Slots)?;
        Ok(digest_without_slots(&parameters, state).wrapping_add(digest_of_rest(&whole)))
    }

    /// Digest of the reduced gradient.
    pub(crate) fn sum_digest(&self) -> u64 {
        match self {
            Self::Host { state, .. } => xxh3_64(bytemuck::cast_slice(&state.reduced)),
            Self::Device { .. } => unreachable!("models on GPUs are not audited"),
        }
    }

    /// Like [`Tensors::digest`], but covers only the step's window of the tensors, as the whole
    /// group waits for the result.
    pub(crate) fn quick_digest(&mut self, state: &State) -> Result<u64, DeviceError> {
        let mut digest = Xxh3Default::new();
        digest.update(&self.window_digest(state.step)?.to_le_bytes());
        update_with_progress(&mut digest, state);
        Ok(digest.digest())
    }

    /// Begins to compute what [`window_digest`](Self::window_digest) will return, on a GPU: it then
    /// does not wait for the work of the step, which does not change the state.
    pub(crate) fn begin_window_digest(&mut self, step: u64) -> Result<(), DeviceError> {
        match self {
            Self::Device { state, .. } => state.begin_window_digests(step),
            Self::Host { .. } => Ok(()),
        }
    }

    /// Digest of the step's window of the state. The windows of `WINDOWS` consecutive steps cover
    /// the whole state, so comparing replicas at every step costs next to nothing. The digest on a
    /// GPU differs from that on the host.
    pub(crate) fn window_digest(&mut self, step: u64) -> Result<u64, DeviceError> {
        Ok(match self {
            Self::Device { state, .. } => {
                let digests = state.window_digests(step)?;
                xxh3_64_with_seed(bytemuck::cast_slice(&digests), step)
            }
            Self::Host { state, .. } => {
                let digest = |tensor: &[f32]| {
                    let window = &tensor[window(step, tensor.len())];
                    xxh3_64_with_seed(bytemuck::cast_slice(window), step)
                };
                digest(&state.parameters) ^ digest(&state.slots).rotate_left(1)
            }
        })
    }
}

impl HostState {
    /// Touches all pages at once: a page that the system allocates on first use would delay the
    /// whole group in the first step.
    pub(crate) fn new(size: ModelSize) -> Self {
        Self::of(StateBuffer::zeros(size.parameters), StateBuffer::zeros(size.slots))
    }

    /// With parameters and a gradient alone: the rest is divided over the group.
    pub(crate) fn sharded(parameters: usize) -> Self {
        let empty = Self::of(StateBuffer::zeros(0), StateBuffer::zeros(0));
        let (parameters, gradient) = (StateBuffer::zeros(parameters), zeros(parameters));
        Self { parameters, gradient, ..empty }
    }

    /// As [`sharded`](Self::sharded), in memory of a program, which has a part of the optimizer's
    /// state that is not divided.
    pub(crate) fn sharded_in_memory(memory: StateMemory) -> Self {
        let StateMemory { parameters, slots } = memory;
        let (gradient, empty) = (zeros(parameters.floats().len()), Self::sharded(0));
        let [parameters, slots] = [parameters, slots].map(StateBuffer::of_program);
        Self { parameters, slots, gradient, ..empty }
    }

    /// As [`sharded`](Self::sharded), without parameters, which a model has in bf16.
    pub(crate) fn sharded_half(parameters: usize) -> Self {
        Self { gradient: zeros(parameters), ..Self::sharded(0) }
    }

    /// Where parameters are created, or received that were: in place of the gradient, which is not
    /// in use before the first step, if a model has the parameters in bf16.
    fn created<'a>(parameters: &'a mut StateBuffer, gradient: &'a mut [f32]) -> &'a mut [f32] {
        if parameters.is_empty() { gradient } else { parameters.writable() }
    }

    /// The state in memory of a program.
    pub(crate) fn in_memory(memory: StateMemory) -> Self {
        let StateMemory { parameters, slots } = memory;
        Self::of(StateBuffer::of_program(parameters), StateBuffer::of_program(slots))
    }

    fn of(parameters: StateBuffer, slots: StateBuffer) -> Self {
        let len = parameters.len();
        Self {
            parameters,
            slots,
            gradient: zeros(len),
            retained: Arc::new(zeros(len)),
            reduced: zeros(len),
            lent: Vec::new(),
            gpu: None,
        }
    }

    /// With a model that computes on a GPU, in these buffers.
    #[cfg(feature = "gpu")]
    pub(crate) fn computing_on(self, buffers: DeviceState) -> Self {
        Self { gpu: Some(GpuCopy { buffers: Box::new(buffers), version: None }), ..self }
    }

    /// Whether the model computes on a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// See [`Tensors::place`].
    pub(crate) fn place(&mut self) -> Result<Place<'_>, DeviceError> {
        let Self { gpu: Some(gpu), parameters, .. } = self else { return Ok(Place::Host(self)) };
        if gpu.version != Some(parameters.version()) {
            gpu.buffers.load(Tensor::Parameters, parameters)?;
            gpu.version = Some(parameters.version());
        }
        Ok(Place::Gpu(&mut gpu.buffers))
    }

    /// Arguments of the step's update.
    pub(crate) fn update(&mut self, step: u64, records: u64) -> Update<'_> {
        let Self { parameters, slots, reduced: sum, .. } = self;
        let (parameters, slots) = (parameters.writable(), slots.writable());
        Update { step, records, sum, parameters, slots, norm: None }
    }

    fn retain_reduced(&mut self) {
        let (len, reduced) = (self.reduced.len(), Arc::new(std::mem::take(&mut self.reduced)));
        self.lent.push(std::mem::replace(&mut self.retained, reduced));
        let is_free = |sum: &Arc<_>| Arc::strong_count(sum) == 1;
        let free = self.lent.iter().position(is_free).map(|at| self.lent.swap_remove(at));
        self.lent.retain(|sum| !is_free(sum));
        self.reduced =
            free.and_then(Arc::into_inner).unwrap_or_else(|| elasticdl_collective::zeros(len));
    }
}

/// The group of a worker that is in one.
fn member_of<T>(group: &mut Option<T>) -> Result<&mut T, CollectiveError> {
    group.as_mut().ok_or(CollectiveError::Aborted { generation: 0 })
}

/// Whether no value is NaN or infinite.
///
/// One pass over memory, in blocks without a branch, which the compiler vectorizes.
pub(crate) fn is_finite(values: &[f32]) -> bool {
    let is_bad = |value: &f32| u32::from(value.to_bits() & EXPONENT == EXPONENT);
    values
        .chunks(FINITE_BLOCK)
        .all(|block| block.iter().fold(0, |bad, value| bad | is_bad(value)) == 0)
}

/// Exponent bits: all set in NaNs and infinities only.
const EXPONENT: u32 = 0x7f80_0000;

/// Number of floats per block, after which a pass may end early.
const FINITE_BLOCK: usize = 16 << 10;

#[cfg(test)]
mod tests;
