//! The buffers, on the fake driver.

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
