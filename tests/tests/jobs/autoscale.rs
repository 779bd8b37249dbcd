//! `--autoscale` adds workers as long as they pay, up to `--max-workers`, and takes back one that
//! does not.

use elasticdl_proto::Status;
use elasticdl_tests::JobFixture;

use crate::PROGRAMS;

/// A job of one to three workers that autoscales until a finding of this kind. Each of its records
/// takes 40 ms. Returns the sizes of its groups, without repetition.
fn sizes_until(found: &str, global_batch_size: u64) -> Vec<u32> {
    let fixture = JobFixture {
        records: 1200,
        micros_per_record: 40_000,
        global_batch_size,
        ..JobFixture::new(PROGRAMS, 1)
    };
    let command = fixture.command(0).option("max-workers", "3").flag("autoscale");
    let mut job = command.start();
    let is_found = |status: &Status| status.autoscale.as_ref().is_some_and(|it| it.contains(found));
    let status = job.wait_for(found, is_found);
    job.wait_for_members(status.workers_desired as usize);
    let is_said = |event: &String| event.starts_with("autoscale: ") && event.contains(found);
    assert!(status.events.iter().any(is_said), "{:?}", status.events);
    fixture.hurry();
    let ended = job.wait();
    ended.assert_exactly_once(found, fixture.records, fixture.epochs);
    let mut sizes: Vec<u32> = ended.memberships().iter().map(|m| m.world_size).collect();
    sizes.dedup();
    sizes
}

#[test]
fn workers_are_added_as_long_as_they_pay() {
    assert_eq!(sizes_until("more than 2, so they pay; 3 stay", 12), [1, 2, 3]);
}

/// A step has one record for each of two workers.
#[test]
fn a_worker_for_which_a_step_has_no_record_is_taken_back() {
    assert_eq!(sizes_until("the further ones don't pay; 2 stay", 2), [1, 2, 3, 2]);
}
