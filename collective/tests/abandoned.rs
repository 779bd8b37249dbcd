//! An abort of NCCL that does not return. In a process of its own, which uses no NCCL afterwards.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::time::{Duration, Instant};

use elasticdl_collective::device::{DeviceError, NcclPolicy, Path};
use elasticdl_collective::nccl::{NcclState, abandoned};
use elasticdl_collective::{CollectiveError, Communicator};

use crate::group::{Gpu, WATCHDOG, nccl, on_all};

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "gpu/group.rs"]
mod group;

fn begin(group: &mut [Gpu], policy: &NcclPolicy) -> Vec<NcclState> {
    on_all(group, |gpu| {
        gpu.ring.begin_nccl(policy).unwrap();
        gpu.wait_for_nccl()
    })
}

#[test]
fn an_abort_that_does_not_return_is_reported_and_the_process_uses_no_nccl_any_more() {
    let mut group = group::group(2);
    assert_eq!(begin(&mut group, &nccl("abort_blocks")), vec![NcclState::Ready; 2]);
    assert_eq!(abandoned(), 0);
    let mut absent_rank = group.pop().unwrap();
    let mut waiting_rank = group.pop().unwrap();
    let (stream, begun) = (waiting_rank.ring.device().stream().clone(), Instant::now());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let (src, mut dst) =
                (waiting_rank.put(&[1.0_f32]).unwrap(), waiting_rank.put(&[0.0_f32]).unwrap());
            let result = waiting_rank.ring.all_reduce_device(&[], &src, &mut dst, Path::Nccl);
            // Freeing the buffers would wait for the operation that hangs.
            std::mem::forget((src, dst));
            result.unwrap_err()
        });
        while stream.record_event(None).unwrap().is_complete() {
            assert!(begun.elapsed() < WATCHDOG, "the all-reduce does not begin");
        }
        // The other rank sends its header, and never starts the all-reduce.
        absent_rank.ring.host_mut().all_gather(&[]).unwrap_err();
        let error = waits.join().unwrap();
        let waited = Duration::from_secs(1);
        let CollectiveError::Device { source: DeviceError::Abandoned { waited: limit } } = error
        else {
            panic!("{error:?}")
        };
        assert_eq!(limit, waited);
    });
    assert!(abandoned() > 0);
    assert!(waiting_rank.ring.nccl_abort_time().is_none());

    let mut next = group::group(2);
    let reason = "rank 0: an NCCL communicator of this process was not released in time; the \
                  process uses NCCL no more";
    assert_eq!(begin(&mut next, &nccl("")), vec![NcclState::Absent(reason.to_owned()); 2]);
    let sums = on_all(&mut next, |gpu| {
        let (src, mut dst) = (gpu.put(&[1.0_f32; 9]).unwrap(), gpu.put(&[0.0_f32; 9]).unwrap());
        gpu.ring.all_reduce_device(&[], &src, &mut dst, Path::Host).unwrap();
        gpu.get(&dst, 9)
    });
    assert_eq!(sums, vec![vec![2.0; 9]; 2]);
}
