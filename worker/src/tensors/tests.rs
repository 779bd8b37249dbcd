use std::net::Ipv4Addr;
use std::time::Duration;

use elasticdl_collective::{Endpoint, EndpointOptions, GroupSpec, Member, Secret};
use elasticdl_proto::Ledger;

use super::*;
use crate::tensor::WINDOWS;

#[test]
fn a_nan_or_infinity_is_found_at_any_position() {
    for len in [0, 1, 3, 4, 5, FINITE_BLOCK - 1, FINITE_BLOCK, 2 * FINITE_BLOCK + 7] {
        let mut values: Vec<f32> = (0..len).map(|i| i as f32 - 2.5).collect();
        values.iter_mut().step_by(3).for_each(|value| *value = f32::MAX);
        values.iter_mut().step_by(5).for_each(|value| *value = f32::MIN_POSITIVE / 4.0);
        assert!(is_finite(&values), "{len}");
        for at in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|at| *at < len) {
            let infinite = [f32::INFINITY, f32::NEG_INFINITY];
            for bad in
                [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)].into_iter().chain(infinite)
            {
                let good = std::mem::replace(&mut values[at], bad);
                assert!(!is_finite(&values), "{bad} at {at} of {len}");
                values[at] = good;
            }
        }
    }
}

#[test]
fn a_group_of_one_adds_to_the_gradient_of_a_step_that_lacked_records() {
    let options = EndpointOptions::new("job", 1, Secret::new("open sesame"));
    let endpoint = Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options).unwrap();
    let members = vec![Member { id: 1, address: endpoint.address() }];
    let group = endpoint.connect(&GroupSpec { generation: 1, members }, Duration::from_secs(9));
    let mut state = HostState::new(ModelSize { parameters: 2, slots: 0 });
    // What an earlier step has left.
    state.reduced.fill(7.0);
    state.gradient.fill(1.0);
    let mut tensors = Tensors::Host { group: Some(Box::new(group.unwrap())), state };
    tensors.sum(b"", Path::Host, None).unwrap();
    tensors.keep_gradient().unwrap();
    let Tensors::Host { state, .. } = &mut tensors else { unreachable!() };
    state.gradient[1] += 2.0;
    tensors.sum(b"", Path::Host, None).unwrap();
    assert_eq!(*tensors.to_host(Tensor::Reduced).unwrap(), [1.0, 3.0]);
}

#[test]
fn the_memory_of_a_sum_is_used_again_when_it_is_sent() {
    let mut state = HostState::new(ModelSize { parameters: 2, slots: 0 });
    let sum = Arc::clone(&state.retained);
    let address = sum.as_ptr();
    state.retain_reduced();
    assert!(state.reduced.as_ptr() != address && state.reduced.len() == 2);
    state.retain_reduced();
    assert_eq!(state.lent.len(), 1);
    drop(sum);
    state.retain_reduced();
    assert!(state.lent.is_empty() && state.reduced.as_ptr() == address);
}

#[test]
fn a_flipped_bit_changes_the_digest_and_exactly_one_window_digest() {
    let state = State {
        step: 3,
        ledger: Ledger::new(9),
        records_trained: 0,
        evaluation: Default::default(),
        steps_skipped: 0,
        row_touches: 0,
        created: 0,
    };
    let host = |state| Tensors::Host { group: None, state };
    let size = ModelSize { parameters: 1000, slots: 2001 };
    let mut whole = host(HostState::new(size));
    for at in [0, 1, 999, 1000, 2999, 3000] {
        let mut other = HostState::new(size);
        match at {
            0..1000 => other.parameters.writable()[at] = f32::from_bits(1),
            _ => other.slots.writable()[at - 1000] = f32::from_bits(1),
        }
        let mut other = host(other);
        assert_ne!(whole.digest(&state).unwrap(), other.digest(&state).unwrap());
        let mut differ = |digest: &dyn Fn(&mut Tensors, u64) -> u64| {
            (0..WINDOWS)
                .filter(|&step| digest(&mut whole, step) != digest(&mut other, step))
                .count()
        };
        let at_step = |step| State { step, ..state.clone() };
        assert_eq!(differ(&|t, step| t.quick_digest(&at_step(step)).unwrap()), 1, "element {at}");
        assert_eq!(differ(&|t, step| t.window_digest(step).unwrap()), 1, "element {at}");
    }
}
