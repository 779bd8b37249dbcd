//! Measures what this crate does on a GPU in each step, for the figures of the GPU drill.

use std::time::Instant;

use cudarc::driver::{CudaEvent, DriverError, sys};
use elasticdl_collective::device::{Device, DeviceError};
use elasticdl_proto::WireDtype;

use super::DeviceState;
use crate::device::error::cuda;
use crate::optimizer::{AdamW, Optimizer, Sgd};
use crate::tensor::{ModelSize, WINDOWS};

/// The times of one operation on the device's stream.
#[derive(Clone, Debug)]
pub struct OperationTimes {
    /// The operation.
    pub name: &'static str,
    /// Number of bytes of GPU memory that it must read and write.
    pub bytes: usize,
    /// Seconds that it occupied the stream, at each repetition. The GPU was busy before, so that no
    /// launch is waited for.
    pub on_device: Vec<f64>,
    /// Seconds until the call returned, at each repetition; none if the host does not wait for the
    /// GPU.
    pub on_host: Vec<f64>,
}

/// An operation that is measured.
struct Operation {
    name: &'static str,
    /// Number of bytes that it moves for each parameter.
    bytes: f64,
    waits: bool,
    run: fn(&mut DeviceState, u64) -> Result<(), DeviceError>,
}

/// Measures the operations for a model of `parameters` parameters with AdamW, at least 64, with
/// [`COPY`] first.
///
/// # Errors
/// A message that explains what is missing, or the driver's.
pub fn layer_times(
    device: &Device,
    parameters: usize,
    repetitions: usize,
) -> Result<Vec<OperationTimes>, String> {
    let size = ModelSize { parameters, slots: 2 * parameters };
    let mut state = DeviceState::new(device, size, WireDtype::Bf16, None)?;
    let times = |operation| times(&mut state, operation, repetitions);
    OPERATIONS.iter().map(times).collect::<Result<_, _>>().map_err(|error| error.to_string())
}

fn times(
    state: &mut DeviceState,
    operation: &Operation,
    repetitions: usize,
) -> Result<OperationTimes, DeviceError> {
    let Operation { name, bytes, waits, run } = operation;
    let stream = state.stream().clone();
    let driver = |error: DriverError| cuda("measure an operation")(error);
    let event = || stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let pair = |_| Ok([event()?, event()?]);
    let events: Vec<[CudaEvent; 2]> =
        (0..repetitions).map(pair).collect::<Result<_, _>>().map_err(driver)?;
    (0..WARM).try_for_each(|step| run(state, step))?;
    for (step, [start, end]) in (0..).zip(&events) {
        copy(state, step)?;
        start.record(&stream).map_err(driver)?;
        run(state, step)?;
        end.record(&stream).map_err(driver)?;
    }
    let on_device = events.iter().map(|[start, end]| Ok(f64::from(start.elapsed_ms(end)?) / 1e3));
    let on_device = on_device.collect::<Result<_, _>>().map_err(driver)?;
    let mut on_host = Vec::new();
    for step in (0..repetitions as u64).filter(|_| *waits) {
        stream.synchronize().map_err(driver)?;
        let begun = Instant::now();
        run(state, step)?;
        on_host.push(begun.elapsed().as_secs_f64());
    }
    let bytes = (bytes * state.size().parameters as f64) as usize;
    Ok(OperationTimes { name, bytes, on_device, on_host })
}

const OPERATIONS: [Operation; 12] = [
    queued(COPY, 8.0, copy),
    queued("clear the gradient", 4.0, |state, _| state.clear_gradient()),
    queued("add a micro-batch's gradient", 12.0, |state, _| {
        let DeviceState { kernels, reduced, gradient, .. } = state;
        kernels.add(&reduced.as_view(), &mut gradient.as_view_mut())
    }),
    queued("round the gradient to bf16", 6.0, |state, _| {
        let DeviceState { kernels, gradient, wire, .. } = state;
        let [rounded, _] = wire.as_mut().expect("the wire is bf16");
        kernels.round_to_bf16(&gradient.as_view(), &mut rounded.as_view_mut())
    }),
    queued("widen the sum from bf16", 6.0, |state, _| {
        let DeviceState { kernels, reduced, wire, .. } = state;
        let [_, sum] = wire.as_ref().expect("the wire is bf16");
        kernels.widen_bf16(&sum.as_view(), &mut reduced.as_view_mut())
    }),
    queued(FINITE_CHECK, 4.0, |state, _| state.begin_sum_check()),
    Operation {
        name: "finite check, awaited",
        bytes: 4.0,
        waits: true,
        run: |state, _| {
            state.begin_sum_check()?;
            state.end_sum_check().map(drop)
        },
    },
    queued("update by SGD", 12.0, |state, step| {
        state.update(step, 1).apply(&Sgd::new(1e-3).into())
    }),
    queued(ADAM_W, 28.0, |state, step| state.update(step, 1).apply(&AdamW::new(1e-3).into())),
    queued("update by AdamW, clipped", 32.0, |state, step| {
        state.update(step, 1).apply(&Optimizer::from(AdamW::new(1e-3)).clip_norm(1.0))
    }),
    // Of a window of the parameters, and one of the optimizer state.
    queued(DIGESTS, 12.0 / WINDOWS as f64, DeviceState::begin_window_digests),
    Operation {
        name: TO_HOST,
        bytes: 4.0,
        waits: false,
        run: |state, _| {
            state.retain_reduced(false)?;
            state.release_reduced()
        },
    },
];

/// An operation for which the host does not wait.
const fn queued(
    name: &'static str,
    bytes: f64,
    run: fn(&mut DeviceState, u64) -> Result<(), DeviceError>,
) -> Operation {
    Operation { name, bytes, waits: false, run }
}

fn copy(state: &mut DeviceState, _step: u64) -> Result<(), DeviceError> {
    let DeviceState { device, gradient, reduced, .. } = state;
    let copied = device.stream().memcpy_dtod(&**reduced, &mut **gradient);
    copied.map_err(cuda("copy within the device"))
}

/// A copy of the parameters' size within the device, whose rate bounds that of other operations.
pub const COPY: &str = "copy within the device";
/// The copy of the retained sum to the host, over the bus.
pub const TO_HOST: &str = "copy of the sum to the host";
/// What a step by AdamW consists of, if the group is of one worker: these operations.
pub const OF_A_STEP: [&str; 3] = [FINITE_CHECK, ADAM_W, DIGESTS];
const ADAM_W: &str = "update by AdamW";
const DIGESTS: &str = "digests of a step's windows";
const FINITE_CHECK: &str = "finite check";

/// Repetitions that are not measured.
const WARM: u64 = 3;
