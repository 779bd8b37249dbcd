//! Faults of NCCL: the host path keeps working.

use std::path::Path as File;
use std::time::{Duration, Instant};

use elasticdl_collective::device::{DeviceError, NcclPolicy, Path};
use elasticdl_collective::nccl::{Library, NcclState};
use elasticdl_collective::{CollectiveError, Communicator};

use crate::group::{Gpu, WATCHDOG, group, nccl, on_all};

/// An all-reduce of ones.
fn sum(gpu: &mut Gpu, len: usize, path: Path) -> Result<Vec<f32>, CollectiveError> {
    let (src, mut dst) = (gpu.put(&vec![1.0_f32; len])?, gpu.put(&vec![f32::NAN; len])?);
    let result = gpu.ring.all_reduce_device(b"header", &src, &mut dst, path);
    assert_eq!(gpu.get(&src, len), vec![1.0; len], "the source has changed");
    result.map(|_| gpu.get(&dst, len))
}

fn begin(group: &mut [Gpu], policy: &NcclPolicy) -> Vec<NcclState> {
    on_all(group, |gpu| {
        gpu.ring.begin_nccl(policy).unwrap();
        gpu.wait_for_nccl()
    })
}

fn failed(states: &[NcclState], with: &str) -> bool {
    states.iter().all(|state| matches!(state, NcclState::Failed(reason) if reason.contains(with)))
}

#[test]
fn a_missing_incomplete_or_old_library_is_an_error_value() {
    elasticdl_stand_ins::load();
    let missing = Library::open(File::new("/nowhere/libnccl.so.2")).unwrap_err();
    assert!(matches!(missing, DeviceError::NoLibrary { .. }), "{missing:?}");
    let lacking = Library::open(&elasticdl_stand_ins::nccl_with("no_abort")).unwrap_err();
    assert!(
        matches!(lacking, DeviceError::NoSymbol { symbol: "ncclCommAbort", .. }),
        "{lacking:?}"
    );
    let old = Library::open(&elasticdl_stand_ins::nccl_with("old")).unwrap_err();
    assert!(matches!(old, DeviceError::NcclVersion { found: 21_708 }), "{old:?}");
    let other = Library::open(&elasticdl_stand_ins::folder().join("libcuda.so")).unwrap_err();
    assert!(matches!(other, DeviceError::NoSymbol { .. }), "{other:?}");
}

#[test]
fn a_rank_without_nccl_keeps_all_ranks_on_the_host_path_with_the_reason() {
    let mut group = group(3);
    let with = nccl("");
    let without = NcclPolicy::from_file(File::new("/nowhere/libnccl.so.2"));
    let states = on_all(&mut group, |gpu| {
        gpu.ring.begin_nccl(if gpu.ring.host().rank() == 1 { &without } else { &with }).unwrap();
        gpu.ring.nccl_state()
    });
    let NcclState::Absent(reason) = &states[0] else { panic!("{states:?}") };
    let expected =
        "rank 1: /nowhere/libnccl.so.2 can't be loaded: /nowhere/libnccl.so.2: cannot open";
    assert!(reason.starts_with(expected), "{reason}");
    assert!(states.iter().all(|state| state == &states[0]), "{states:?}");
    let sums = on_all(&mut group, |gpu| {
        let refused = sum(gpu, 5, Path::Nccl).unwrap_err();
        assert!(matches!(refused, CollectiveError::Invalid(_)), "{refused:?}");
        sum(gpu, 5, Path::Host).unwrap()
    });
    assert_eq!(sums, vec![vec![3.0; 5]; 3]);
}

#[test]
fn the_host_path_works_while_and_after_the_initialization_of_nccl_hangs() {
    for fault in ["init_hangs", "init_blocks"] {
        let mut group = group(2);
        let policy = nccl(fault);
        let sums = on_all(&mut group, |gpu| {
            gpu.ring.begin_nccl(&policy).unwrap();
            assert_eq!(gpu.ring.nccl_state(), NcclState::Building);
            sum(gpu, 1000, Path::Host).unwrap()
        });
        assert_eq!(sums, vec![vec![2.0; 1000]; 2]);
        let states = on_all(&mut group, |gpu| gpu.wait_for_nccl());
        assert!(failed(&states, "did not complete within 1s"), "{fault}: {states:?}");
        let sums = on_all(&mut group, |gpu| sum(gpu, 1000, Path::Host).unwrap());
        assert_eq!(sums, vec![vec![2.0; 1000]; 2]);
    }
}

#[test]
fn a_failed_initialization_is_reported() {
    let mut group = group(2);
    let states = begin(&mut group, &nccl("init_fails"));
    assert!(
        failed(
            &states,
            "failed to create a communicator: system error of the fake: no interface for the \
             bootstrap (result 2)"
        ),
        "{states:?}"
    );
    let sums = on_all(&mut group, |gpu| sum(gpu, 3, Path::Host).unwrap());
    assert_eq!(sums, vec![vec![2.0; 3]; 2]);
}

#[test]
fn an_error_that_a_setting_of_containers_prevents_names_it() {
    let mut group = group(2);
    let states = begin(&mut group, &nccl("no_host_memory"));
    let setting = "this version may need NCCL_CUMEM_HOST_ENABLE=0 in its environment (result 1)";
    assert!(failed(&states, setting), "{states:?}");
}

#[test]
fn a_communicator_that_is_returned_with_an_error_is_released() {
    let mut group = group(2);
    let states = begin(&mut group, &nccl("init_refused"));
    assert!(failed(&states, "system error of the fake (result 2)"), "{states:?}");
    assert_eq!(elasticdl_stand_ins::refused_communicators(), 0);
}

#[test]
fn an_error_in_an_operation_ends_the_group_and_keeps_the_source() {
    for (fault, code) in [("async_error", 6), ("op_fails", 2)] {
        let mut group = group(3);
        let states = begin(&mut group, &nccl(fault));
        assert_eq!(states, vec![NcclState::Ready; 3]);
        on_all(&mut group, |gpu| {
            assert_eq!(sum(gpu, 1000, Path::Nccl).unwrap(), vec![3.0; 1000]);
            match sum(gpu, 1000, Path::Nccl).unwrap_err() {
                CollectiveError::Device { source: DeviceError::Nccl { code: got, .. } } => {
                    assert_eq!(got, code)
                }
                // Another rank failed first, and its closed link shows first.
                CollectiveError::PeerLost { .. } => {}
                other => panic!("{fault}: {other:?}"),
            }
            let again = sum(gpu, 1000, Path::Host).unwrap_err();
            assert!(matches!(again, CollectiveError::Aborted { generation: 1 }), "{again:?}");
            assert!(matches!(gpu.ring.nccl_state(), NcclState::Failed(_)));
            gpu.wait_for_release();
        });
    }
}

#[test]
fn a_rank_lost_during_an_nccl_all_reduce_ends_it_on_all_ranks() {
    let mut group = group(4);
    let (fine, breaks) = (nccl(""), nccl("async_error"));
    on_all(&mut group, |gpu| {
        gpu.ring.begin_nccl(if gpu.ring.host().rank() == 0 { &breaks } else { &fine }).unwrap();
        assert_eq!(gpu.wait_for_nccl(), NcclState::Ready);
        assert_eq!(sum(gpu, 100_000, Path::Nccl).unwrap(), vec![4.0; 100_000]);
    });
    // Rank 0 sends its header and then fails; two of the other ranks are its neighbours.
    let ends = on_all(&mut group, |gpu| {
        let end = sum(gpu, 100_000, Path::Nccl).unwrap_err();
        gpu.wait_for_release();
        end
    });
    assert!(matches!(ends[0], CollectiveError::Device { .. }), "{ends:?}");
    assert!(
        ends[1..].iter().all(|end| matches!(end, CollectiveError::PeerLost { .. })),
        "{ends:?}"
    );
}

#[test]
fn a_group_goes_on_while_nccl_releases_its_communicator() {
    let mut group = group(3);
    let (lasts, breaks) = (nccl("abort_lasts"), nccl("async_error"));
    let ends = on_all(&mut group, |gpu| {
        gpu.ring.begin_nccl(if gpu.ring.host().rank() == 0 { &breaks } else { &lasts }).unwrap();
        assert_eq!(gpu.wait_for_nccl(), NcclState::Ready);
        sum(gpu, 1000, Path::Nccl).unwrap();
        // The check of the source in `sum` needs the stream.
        (sum(gpu, 1000, Path::Nccl).unwrap_err(), gpu.ring.nccl_abort_time())
    });
    for (end, abort_time) in &ends[1..] {
        assert!(matches!(end, CollectiveError::PeerLost { .. }), "{ends:?}");
        assert_eq!(*abort_time, None, "the abort has returned");
    }
}

#[test]
fn an_abort_waits_for_a_poll() {
    let mut group = group(2);
    assert_eq!(begin(&mut group, &nccl("poll_lasts")), vec![NcclState::Ready; 2]);
    let mut absent_rank = group.pop().unwrap();
    let mut waiting_rank = group.pop().unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| sum(&mut waiting_rank, 1, Path::Nccl).unwrap_err());
        while elasticdl_stand_ins::long_polls() == 0 {
            assert!(begun.elapsed() < WATCHDOG, "the all-reduce is not polled");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The other rank sends another header, which ends the group.
        absent_rank.ring.host_mut().all_gather(&[]).unwrap_err();
        let error = waits.join().unwrap();
        assert!(!matches!(error, CollectiveError::Device { .. }), "{error:?}");
    });
    waiting_rank.wait_for_release();
}

#[test]
fn a_second_communicator_in_the_same_group_replaces_the_first() {
    let fine = nccl("");
    for world in 1..=3 {
        let mut group = group(world);
        // The first communicator may not be ready yet.
        on_all(&mut group, |gpu| gpu.ring.begin_nccl(&fine).unwrap());
        assert_eq!(begin(&mut group, &fine), vec![NcclState::Ready; world]);
        let sums = on_all(&mut group, |gpu| sum(gpu, 9, Path::Nccl).unwrap());
        assert_eq!(sums, vec![vec![world as f32; 9]; world]);
    }
}
