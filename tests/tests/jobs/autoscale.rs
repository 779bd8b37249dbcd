//! `--autoscale` measures the group, says so, and tries another number of workers. Whether they pay
//! depends on the machine.

use elasticdl_proto::Status;
use elasticdl_tests::JobFixture;

use crate::PROGRAMS;

#[test]
fn a_job_that_has_been_measured_tries_one_worker_more() {
    let fixture = JobFixture {
        records: 1200,
        micros_per_record: 40_000,
        global_batch_size: 12,
        ..JobFixture::new(PROGRAMS, 1)
    };
    let command = fixture.command(0).option("max-workers", "2").flag("autoscale");
    let mut job = command.start();
    let is_found = |status: &Status| status.autoscale.is_some();
    let status = job.wait_for("a finding", is_found);
    let found = status.autoscale.unwrap();
    assert!(found.starts_with("1 worker makes ") && found.ends_with("; trying 2"), "{found}");
    assert!(status.events.contains(&format!("autoscale: {found}")), "{:?}", status.events);
    job.wait_for_members(2);
    fixture.hurry();
    job.wait().assert_exactly_once("a trial", fixture.records, fixture.epochs);
}
