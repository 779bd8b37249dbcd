//! The phase `job`.

use std::env;
use std::ffi::OsString;
use std::fs;

use elasticdl_proto::{Cause, MembershipChange};
use elasticdl_tests::{counting_data, each_once, quantile, send};
use rustix::process::Signal;

use crate::kernels::completed;
use crate::{Drill, Fallible};

/// Shows that a job on GPUs counts every record exactly once while its workers are killed, on this
/// machine's driver, and how long the others pause. The model's parameters count the records, so
/// the model itself is the proof. A pause begins with the last step that was committed before a
/// worker was killed, and ends with the first one after; the summary reports it.
pub(crate) fn job(drill: &mut Drill) -> Fallible<()> {
    let program = env::current_exe()?;
    let folder = tempfile::tempdir()?;
    let (data, hurry) = (folder.path().join("data"), folder.path().join("hurry"));
    counting_data(&data, RECORDS, 3)?;
    let mut words = vec![program.into_os_string(), "--gpu".into(), "--hurry-when".into()];
    words.push(hurry.clone().into());
    let records = RECORDS.to_string();
    words.extend(["--records", &records, "--micros-per-record", "1000"].map(OsString::from));
    let mut job = drill
        .job(&folder.path().join("job"), &words)?
        .option("training-data", &data)
        .option("num-epochs", EPOCHS.to_string())
        .option("num-workers", WORKERS.to_string())
        .option("global-batch-size", "48")
        .start();
    job.wait_for_work_of(WORKERS);
    let mut transport = String::new();
    for kill in 0..KILLS {
        drill.check_time()?;
        let has_settled = |transport: &String| !transport.contains("NCCL is being built");
        let status = job.wait_for("the transport of the all-reduce", |status| {
            status.allreduce_transport.as_ref().is_some_and(has_settled)
        });
        transport = status.allreduce_transport.unwrap_or_default();
        // Another rank each time, the lowest one among them.
        let (worker, pid) = job.members()[kill % WORKERS];
        send(pid, Signal::KILL);
        job.wait_for_members_without(WORKERS, &[worker]);
        job.wait_for_next_step();
    }
    fs::write(&hurry, "")?;
    let ended = job.wait();
    drill.note("job", format!("{WORKERS} workers, gradients summed over {transport}"));
    if drill.devices < WORKERS {
        let text = "workers share a GPU here, so their gradients go through the host's memory; a \
                    job over NCCL needs a GPU for each worker";
        drill.note("job", text);
    }
    let summary = completed(&ended)?;
    let records = summary.records;
    for (what, count) in [
        ("expected", records.expected),
        ("counted", records.counted),
        ("missing", records.missing),
        ("repeated", records.repeated),
    ] {
        drill.add("job", format!("records {what}, {KILLS} workers killed"), count as f64, "");
    }
    let total = RECORDS * EPOCHS;
    let counts = format!("{EPOCHS} {EPOCHS} {total}");
    let found = summary.model_summary.as_deref().unwrap_or_default();
    if records != each_once(total) || found != counts {
        return Err(format!("not exactly once: the model counted {found}, not {counts}").into());
    }
    pauses(drill, "after a kill", Cause::Lost, &summary.memberships);
    pauses(drill, "for a joining worker", Cause::Join, &summary.memberships);
    Ok(())
}

/// Adds the pauses at membership changes of one cause.
fn pauses(drill: &mut Drill, what: &str, cause: Cause, memberships: &[MembershipChange]) {
    let changes = memberships.iter().filter(|change| change.cause == cause);
    let mut gaps: Vec<(f64, &MembershipChange)> =
        changes.filter_map(|change| Some((change.gap_ms?, change))).collect();
    gaps.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let Some((longest, change)) = gaps.last() else { return };
    let mut all: Vec<f64> = gaps.iter().map(|(gap, _)| *gap).collect();
    let median = quantile(&mut all, 0.5);
    drill.add("job", format!("pause {what}, median of {}", all.len()), median, "ms");
    drill.add("job", format!("pause {what}, the longest"), *longest, "ms");
    for (part, took) in change.phases() {
        drill.add("job", format!("of which {part}"), took.unwrap_or(0.0), "ms");
    }
}

const WORKERS: usize = 3;
const KILLS: usize = 3;
/// Enough that the job outlasts the kills; after them, it takes no more time than its steps do.
const RECORDS: u64 = 20_000;
const EPOCHS: u64 = 6;
