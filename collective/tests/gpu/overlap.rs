//! Sums of parts of a buffer, while the rest is computed.

#![allow(unsafe_code, reason = "sums are in progress after a return")]

use std::ops::Range;
use std::time::{Duration, Instant};

use elasticdl_collective::device::{Device, Overlap, Path};
use elasticdl_collective::nccl::NcclState;
use elasticdl_collective::{CollectiveError, Communicator};

use crate::group::{Gpu, WATCHDOG, group, nccl, on_all};

const PARTS: [Range<usize>; 3] = [600..1000, 200..600, 0..200];
const LEN: usize = 1000;

fn group_on_nccl(world: usize, faults: &[&str]) -> Vec<Gpu> {
    let mut group = group(world);
    on_all(&mut group, |gpu| {
        let fault = faults.get(gpu.ring.host().rank()).copied().unwrap_or("");
        gpu.ring.begin_nccl(&nccl(fault)).unwrap();
        assert_eq!(gpu.wait_for_nccl(), NcclState::Ready);
    });
    group
}

/// Writes a part of the buffer on the device's stream.
fn compute(device: &Device, overlap: &mut Overlap<'_, f32>, part: &Range<usize>, value: f32) {
    let values = device.stream().clone_htod(&vec![value; part.len()]).unwrap();
    let mut rest = overlap.rest();
    device.stream().memcpy_dtod(&values, &mut rest.slice_mut(part.clone())).unwrap();
}

/// A step in which a rank begins the sums of its first `early` parts while it computes.
fn step(gpu: &mut Gpu, early: usize) -> Result<(Vec<f32>, Vec<Vec<u8>>), CollectiveError> {
    let rank = gpu.ring.host().rank();
    let device = gpu.ring.device().clone();
    let (mut src, mut dst) = (gpu.put(&[f32::NAN; LEN])?, gpu.put(&[f32::NAN; LEN])?);
    let fill = |overlap: &mut Overlap<'_, f32>| {
        for (at, part) in PARTS.iter().enumerate() {
            compute(&device, overlap, part, (10 * at + rank) as f32);
            if at < early {
                overlap.sum_from(part.start);
                assert_eq!(overlap.rest_len(), part.start);
            }
        }
    };
    // SAFETY: on success, `sum_rest` is next; otherwise, the group has ended.
    let ((), begun) = unsafe { gpu.ring.overlap(&mut src, &mut dst, fill) };
    let begun = begun?;
    assert_eq!(begun, early);
    let headers = gpu.ring.sum_rest(&[rank as u8], &src, &mut dst, &PARTS[begun..])?;
    let kept = gpu.get(&src, LEN);
    for (at, part) in PARTS.iter().enumerate() {
        let all = kept[part.clone()].iter().all(|value| *value == (10 * at + rank) as f32);
        assert!(all, "the source has changed");
    }
    Ok((gpu.get(&dst, LEN), headers))
}

#[test]
fn ranks_that_begin_different_parts_early_get_the_same_sums() {
    let mut group = group_on_nccl(3, &[]);
    for turn in 0..4 {
        // The last part is never summed early.
        let all = on_all(&mut group, |gpu| step(gpu, (turn + gpu.ring.host().rank()) % 3).unwrap());
        for (sums, headers) in all {
            assert_eq!(headers, [[0], [1], [2]]);
            for (at, part) in PARTS.iter().enumerate() {
                assert_eq!(sums[part.clone()], vec![(30 * at + 3) as f32; part.len()]);
            }
        }
        // Other operations work between such steps.
        let sums = on_all(&mut group, |gpu| {
            let (src, mut dst) = (gpu.put(&[1.0_f32]).unwrap(), gpu.put(&[0.0_f32]).unwrap());
            gpu.ring.all_reduce_device(&[], &src, &mut dst, Path::Nccl).unwrap();
            gpu.get(&dst, 1)
        });
        assert_eq!(sums, vec![vec![3.0]; 3]);
    }
}

#[test]
fn a_part_is_summed_while_the_rest_is_computed() {
    let mut group = group_on_nccl(2, &[]);
    on_all(&mut group, |gpu| {
        let device = gpu.ring.device().clone();
        let (mut src, mut dst) =
            (gpu.put(&[0.0_f32; LEN]).unwrap(), gpu.put(&[0.0_f32; LEN]).unwrap());
        let fill = |overlap: &mut Overlap<'_, f32>| {
            compute(&device, overlap, &PARTS[0], 2.0);
            overlap.sum_from(PARTS[0].start);
            // Work that does not end, as the rest of a backward pass.
            elasticdl_stand_ins::Hold::on(device.stream().cu_stream().cast())
        };
        // SAFETY: the only use of `dst` before `sum_rest` is this test's.
        let (held, begun) = unsafe { gpu.ring.overlap(&mut src, &mut dst, fill) };
        assert_eq!(begun.unwrap(), 1);
        let other = device.stream().context().new_stream().unwrap();
        let begun = Instant::now();
        while other.clone_dtoh(&dst.slice(PARTS[0].clone())).unwrap() != vec![4.0; 400] {
            assert!(begun.elapsed() < WATCHDOG, "the part is not summed before the rest");
        }
        drop(held);
        gpu.ring.sum_rest(&[], &src, &mut dst, &PARTS[1..]).unwrap();
        assert_eq!(gpu.get(&dst, LEN)[..600], [0.0; 600]);
    });
}

/// The kernels of all that are there have to end at an abort, one after the other.
#[test]
fn a_rank_that_waits_for_another_has_two_sums_on_its_stream() {
    let mut group = group_on_nccl(2, &[]);
    on_all(&mut group, |gpu| {
        let device = gpu.ring.device().clone();
        let is_late = gpu.ring.host().rank() == 1;
        let (mut src, mut dst) =
            (gpu.put(&[1.0_f32; LEN]).unwrap(), gpu.put(&[0.0_f32; LEN]).unwrap());
        // The sums of the late one follow it.
        let held =
            is_late.then(|| elasticdl_stand_ins::Hold::on(device.stream().cu_stream().cast()));
        let (begin, begun) = std::sync::mpsc::channel();
        let overlap = || {
            let fill = |overlap: &mut Overlap<'_, f32>| {
                (1..10).rev().for_each(|part| overlap.sum_from(100 * part));
                begin.send(()).unwrap();
            };
            // SAFETY: `sum_rest` is next.
            let ((), begun) = unsafe { gpu.ring.overlap(&mut src, &mut dst, fill) };
            assert_eq!(begun.unwrap(), 9);
        };
        std::thread::scope(|scope| {
            let overlapping = scope.spawn(overlap);
            begun.recv().unwrap();
            std::thread::sleep(Duration::from_millis(100));
            drop(held);
            overlapping.join().unwrap();
        });
        gpu.ring.sum_rest(&[], &src, &mut dst, std::slice::from_ref(&(0..100))).unwrap();
        assert_eq!(gpu.get(&dst, LEN), [2.0; LEN]);
    });
    // In all tests of this process.
    assert_eq!(elasticdl_stand_ins::most_operations(), 2);
}

#[test]
fn a_fault_during_the_computation_ends_the_step_and_keeps_the_gradient() {
    // The second operation of rank 0 fails. Neither its links nor the others' tell before the step.
    let mut group = group_on_nccl(3, &["op_fails"]);
    let ends = on_all(&mut group, |gpu| {
        let end = step(gpu, 2).unwrap_err();
        gpu.wait_for_release();
        end
    });
    assert!(matches!(ends[0], CollectiveError::Device { .. }), "{ends:?}");
    for end in &ends[1..] {
        assert!(matches!(end, CollectiveError::PeerLost { .. }), "{ends:?}");
    }
}

#[test]
fn the_stream_is_usable_while_a_sum_hangs_and_a_dropped_group_has_ended_it() {
    let mut group = group_on_nccl(2, &[]);
    let begin = |gpu: &mut Gpu| {
        let device = gpu.ring.device().clone();
        let mut buffers = (gpu.put(&[0.0_f32; LEN]).unwrap(), gpu.put(&[0.0_f32; LEN]).unwrap());
        let fill = |overlap: &mut Overlap<'_, f32>| {
            compute(&device, overlap, &PARTS[0], 2.0);
            overlap.sum_from(PARTS[0].start);
        };
        // SAFETY: the group is dropped before the buffers.
        let ((), begun) = unsafe { gpu.ring.overlap(&mut buffers.0, &mut buffers.1, fill) };
        (begun, buffers)
    };
    let mut late = group.pop().unwrap();
    let mut early = group.pop().unwrap();
    let (begun, (src, dst)) = begin(&mut early);
    assert_eq!(begun.unwrap(), 1);
    assert_eq!(early.get(&src, LEN)[600..], [2.0; 400]);
    let stream = early.ring.device().stream().clone();
    drop(early);
    // The other rank begins the sum now. It must not reach memory that may be in other use.
    let (_, buffers) = begin(&mut late);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(stream.clone_dtoh(&dst).unwrap(), [0.0; LEN]);
    drop(late);
    drop(buffers);
}

#[test]
fn parts_that_do_not_cover_the_rest_are_refused() {
    let mut group = group_on_nccl(1, &[]);
    let gpu = &mut group[0];
    let (src, mut dst) = (gpu.put(&[0.0_f32; LEN]).unwrap(), gpu.put(&[0.0_f32; LEN]).unwrap());
    for parts in [
        &[][..],
        &PARTS[..1],
        &PARTS[..2],
        &[PARTS[0].clone(), PARTS[2].clone()],
        &[PARTS[2].clone(), PARTS[1].clone()],
    ] {
        let error = gpu.ring.sum_rest(&[], &src, &mut dst, parts).unwrap_err();
        assert!(matches!(error, CollectiveError::Invalid(_)), "{parts:?}: {error:?}");
    }
    assert_eq!(gpu.ring.sum_rest(b"h", &src, &mut dst, &PARTS).unwrap(), [b"h"]);
}

#[test]
fn another_sum_is_refused_while_parts_are_summed() {
    let mut group = group_on_nccl(1, &[]);
    let gpu = &mut group[0];
    let (mut src, mut dst) = (gpu.put(&[1.0_f32; LEN]).unwrap(), gpu.put(&[0.0_f32; LEN]).unwrap());
    let mut other = gpu.put(&[0.0_f32; LEN]).unwrap();
    let fill = |overlap: &mut Overlap<'_, f32>| overlap.sum_from(PARTS[0].start);
    // SAFETY: `sum_rest` follows before the next use of `dst`.
    let ((), begun) = unsafe { gpu.ring.overlap(&mut src, &mut dst, fill) };
    assert_eq!(begun.unwrap(), 1);
    for path in [Path::Host, Path::Nccl] {
        let refused = gpu.ring.all_reduce_device(&[], &src, &mut other, path).unwrap_err();
        assert!(matches!(refused, CollectiveError::Invalid(_)), "{refused:?}");
    }
    gpu.ring.sum_rest(&[], &src, &mut dst, &PARTS[1..]).unwrap();
    assert_eq!(gpu.get(&dst, LEN), [1.0; LEN]);
    gpu.ring.all_reduce_device(&[], &src, &mut other, Path::Host).unwrap();
}

#[test]
fn the_threads_of_nccl_end_no_capture_of_another_thread() {
    let mut group = group_on_nccl(2, &[]);
    on_all(&mut group, |gpu| step(gpu, 1).map(drop).unwrap());
    for name in [c"nccl", c"nccl-watchdog"] {
        let [ending, _] = elasticdl_stand_ins::calls_during_captures(name);
        assert_eq!(ending, 0, "{name:?}");
    }
    let [_, others] = elasticdl_stand_ins::calls_during_captures(c"nccl");
    assert!(others > 0);
}
