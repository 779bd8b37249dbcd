//! The buffers, on the fake driver.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use elasticdl_collective::device::NcclPolicy;
use elasticdl_collective::nccl::NcclState;
use elasticdl_collective::{Endpoint, EndpointOptions, GroupSpec, Member, Secret};
use elasticdl_proto::WireDtype;

use super::*;

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
