//! The buffers, on the fake driver.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use elasticdl_collective::device::NcclPolicy;
use elasticdl_collective::nccl::NcclState;
use elasticdl_collective::{Endpoint, EndpointOptions, GroupSpec, Member, Secret};
use elasticdl_proto::WireDtype;

use super::*;
use crate::tensors::{HostState, Place, Tensors};

const LEN: usize = 100_000;

fn state() -> DeviceState {
    state_of(LEN)
}

/// A state with two slots per parameter, as AdamW has.
fn state_of(parameters: usize) -> DeviceState {
    elasticdl_stand_ins::load();
    let device = Device::open(0).unwrap();
    let size = ModelSize { parameters, slots: 2 * parameters };
    DeviceState::new(&device, size, WireDtype::F32, None).unwrap()
}

/// Of a model that is large beside the kernels' own buffers.
const PARAMETERS: usize = 2_000_000;

#[test]
fn with_adamw_a_gpu_holds_five_times_the_parameters() {
    let bytes = 4 * PARAMETERS as u64;
    let before = elasticdl_stand_ins::bytes_allocated();
    let mut state = state_of(PARAMETERS);
    for _ in 0..3 {
        state.load(Tensor::Reduced, &vec![1.0; PARAMETERS]).unwrap();
        state.retain_reduced(false).unwrap();
    }
    let allocated = elasticdl_stand_ins::bytes_allocated() - before;
    // The kernels have buffers of a fixed size, of 1 MB.
    assert!((5 * bytes..11 * bytes / 2).contains(&allocated), "{allocated} of {bytes}");
}

#[test]
fn a_retained_sum_is_copied_beside_the_next_step_and_before_its_sum() {
    let mut state = state();
    let stream = state.stream().cu_stream().cast();
    for step in 0..3 {
        let value = step as f32;
        state.load(Tensor::Reduced, &[value; LEN]).unwrap();
        // The work of the step has not ended when the next one is enqueued.
        let held = elasticdl_stand_ins::Hold::on(stream);
        state.retain_reduced(false).unwrap();
        let overwrite = |state: &mut DeviceState| {
            state.release_reduced().unwrap();
            let DeviceState { device, reduced, .. } = state;
            device.stream().memset_zeros(&mut **reduced).unwrap();
        };
        overwrite(&mut state);
        drop(held);
        assert_eq!(*state.to_host(Tensor::Retained).unwrap(), [value; LEN]);
        assert_eq!(*state.to_host(Tensor::Reduced).unwrap(), [0.0; LEN]);
    }
}

#[test]
fn a_copy_that_is_in_use_keeps_its_values() {
    let mut state = state();
    let copies: Vec<_> = [1.0, 2.0, 3.0]
        .map(|value| {
            state.load(Tensor::Reduced, &[value; LEN]).unwrap();
            state.retain_reduced(false).unwrap();
            state.to_host(Tensor::Retained).unwrap()
        })
        .into();
    for (copy, value) in copies.iter().zip([1.0, 2.0, 3.0]) {
        assert_eq!(**copy, [value; LEN]);
    }
}

#[test]
fn a_worker_alone_retains_its_sum_where_it_is() {
    let mut state = state();
    state.load(Tensor::Reduced, &[4.0; LEN]).unwrap();
    let before = elasticdl_stand_ins::bytes_copied();
    state.retain_reduced(true).unwrap();
    assert_eq!(elasticdl_stand_ins::bytes_copied(), before);
    assert_eq!(*state.to_host(Tensor::Retained).unwrap(), [4.0; LEN]);
}

#[test]
fn an_update_is_enqueued_before_the_host_knows_whether_the_sum_is_finite() {
    let mut state = state();
    for (value, expected) in [(1.0, -1.0), (f32::INFINITY, -1.0), (2.0, -3.0)] {
        state.load(Tensor::Reduced, &[value; LEN]).unwrap();
        let waits = elasticdl_stand_ins::waits();
        state.begin_sum_check().unwrap();
        state.update_if_finite((0, 1), &crate::Sgd::new(1.0).into()).unwrap();
        assert_eq!(elasticdl_stand_ins::waits(), waits);
        assert_eq!(state.end_sum_check().unwrap(), value.is_finite());
        assert_eq!(*state.to_host(Tensor::Parameters).unwrap(), [expected; LEN]);
    }
}

#[test]
fn memory_of_a_retained_sum_is_not_freed_during_its_copy() {
    let mut state = state();
    // More unused copies than are kept.
    drop([(); 3].map(|()| state.to_host(Tensor::Parameters).unwrap()));
    state.load(Tensor::Reduced, &[1.0; LEN]).unwrap();
    state.retain_reduced(false).unwrap();
    // The group has become one. The fake driver refuses to unlock memory that a copy writes.
    state.retain_reduced(true).unwrap();
    assert_eq!(*state.to_host(Tensor::Retained).unwrap(), [1.0; LEN]);
}

#[test]
fn the_trainer_ends_no_capture_of_another_thread() {
    const NAME: &std::ffi::CStr = c"trains-here";
    let trains = || {
        let mut state = state();
        state.load(Tensor::Reduced, &[1.0; LEN]).unwrap();
        state.retain_reduced(false).unwrap();
    };
    let thread = std::thread::Builder::new().name(NAME.to_str().unwrap().into()).spawn(trains);
    thread.unwrap().join().unwrap();
    let [ending, others] = elasticdl_stand_ins::calls_during_captures(NAME);
    assert!(ending == 0 && others > 0, "{ending}, {others}");
}

/// A group of one with NCCL.
fn group_on_nccl(state: &DeviceState) -> DeviceGroup {
    let options = EndpointOptions::new("job", 1, Secret::new("secret"));
    let endpoint = Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options).unwrap();
    let members = vec![Member { id: 1, address: endpoint.address() }];
    let group = endpoint.connect(&GroupSpec { generation: 1, members }, Duration::from_secs(9));
    let mut group = DeviceGroup::new(group.unwrap(), state.device().clone());
    let library = elasticdl_stand_ins::folder().join("libnccl.so.2");
    group.begin_nccl(&NcclPolicy::from_file(&library)).unwrap();
    let begun = Instant::now();
    while group.nccl_state() != NcclState::Ready {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", group.nccl_state());
        std::thread::yield_now();
    }
    group
}

#[test]
fn the_sum_of_a_bucket_waits_for_the_copy_of_the_last_sum_and_the_step_does_not() {
    let mut state = state();
    let mut group = group_on_nccl(&state);
    state.load(Tensor::Reduced, &[1.0; LEN]).unwrap();
    let held = elasticdl_stand_ins::Hold::on(state.retained.stream.cu_stream().cast());
    state.retain_reduced(false).unwrap();
    let stream = state.stream().clone();
    let ((), summed) = state.overlap(&mut group, 1, LEN / 2, |_, gradients| {
        stream.memset_zeros(&mut gradients.sum()).unwrap();
        gradients.complete_from(LEN / 2);
    });
    assert_eq!(summed.unwrap(), 1);
    let step = stream.record_event(None).unwrap();
    assert!(step.is_complete(), "the step waits for the copy");
    drop(held);
    let buckets = SummedBuckets { len: LEN / 2, summed: 1 };
    state.sum(&mut group, b"", Path::Nccl, Some(buckets)).unwrap();
    assert_eq!(*state.to_host(Tensor::Retained).unwrap(), [1.0; LEN]);
    assert_eq!(*state.to_host(Tensor::Reduced).unwrap(), [0.0; LEN]);
}

/// The tensors of a worker that has a part of the optimizer's state, and computes on a GPU.
fn sharded(parameters: usize) -> Tensors {
    elasticdl_stand_ins::load();
    let device = Device::open(0).unwrap();
    let buffers = DeviceState::of_computation(&device, parameters, None).unwrap();
    let state = HostState::sharded(parameters).computing_on(buffers);
    Tensors::Host { group: None, state }
}

fn on_gpu(tensors: &mut Tensors) -> &mut DeviceState {
    let Place::Gpu(state) = tensors.place().unwrap() else { panic!("it is on a GPU") };
    state
}

#[test]
fn a_gpu_computes_with_the_parameters_of_the_host_whatever_has_written_them() {
    let mut tensors = sharded(LEN);
    let mut expected = vec![0.0; LEN];
    for writer in 0..4 {
        let at = LEN / (writer + 1) - 1;
        expected[at] += 1.0;
        let write = |parameters: &mut [f32]| parameters.copy_from_slice(&expected);
        // A joining worker is sent them meanwhile.
        let shared = tensors.to_host(Tensor::Parameters).unwrap();
        match (writer, &mut tensors) {
            (1, tensors) => {
                let filled = tensors.fill_state(|parameters, _| {
                    write(parameters);
                    Ok::<_, DeviceError>(())
                });
                filled.unwrap();
            }
            (2, tensors) => {
                let filled = tensors.fill_part(at, 1, |part| {
                    part[0] += 1.0;
                    Ok::<_, DeviceError>(())
                });
                filled.unwrap();
            }
            (_, Tensors::Host { state, .. }) => write(state.parameters.writable()),
            (_, Tensors::Device { .. }) => unreachable!("the state is on the host"),
        }
        drop(shared);
        assert_eq!(*on_gpu(&mut tensors).to_host(Tensor::Parameters).unwrap(), expected);
        let before = elasticdl_stand_ins::bytes_copied();
        let version = on_gpu(&mut tensors).gradient(1, None).1.parameters_version();
        assert_eq!(on_gpu(&mut tensors).gradient(1, None).1.parameters_version(), version);
        assert_eq!(elasticdl_stand_ins::bytes_copied(), before, "nothing has changed");
    }
}

#[test]
fn the_gradient_of_a_gpu_is_summed_on_the_host() {
    let mut tensors = sharded(LEN);
    let gradient = |tensors: &Tensors| match tensors {
        Tensors::Host { state, .. } => state.gradient.clone(),
        Tensors::Device { .. } => unreachable!("the state is on the host"),
    };
    for times in 1..4 {
        // Of one micro-batch after the other.
        for part in [1.0, 2.0] {
            let stream = on_gpu(&mut tensors).stream().clone();
            let values = stream.clone_htod(&vec![part * times as f32; LEN]).unwrap();
            let mut gradients = on_gpu(&mut tensors).gradient(1, None).1;
            gradients.add_sum(0..LEN, &values.as_view()).unwrap();
        }
        tensors.end_gradient().unwrap();
        assert_eq!(gradient(&tensors), [3.0 * times as f32; LEN]);
        tensors.clear_gradient().unwrap();
        assert_eq!(gradient(&tensors), [0.0; LEN]);
    }
}

#[test]
fn with_a_divided_optimizer_a_gpu_holds_the_parameters_and_the_gradient() {
    let bytes = 4 * PARAMETERS as u64;
    let before = elasticdl_stand_ins::bytes_allocated();
    let mut tensors = sharded(PARAMETERS);
    on_gpu(&mut tensors);
    tensors.end_gradient().unwrap();
    let allocated = elasticdl_stand_ins::bytes_allocated() - before;
    assert!((2 * bytes..5 * bytes / 2).contains(&allocated), "{allocated} of {bytes}");
}
