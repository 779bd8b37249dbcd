//! The status of a job as a table.

use std::fmt::Write as _;

use elasticdl_master::job::{counted, format_metrics, format_value};
use elasticdl_proto::{
    AvoidedHost, CheckpointsSummary, DisconnectedStatus, Evaluated, ShardCounts, Spares, Status,
    TablesStatus, WorkerStatus,
};
use indicatif::HumanBytes;

use super::summary::{MEMBERSHIP_COLUMNS, audits, best_value, membership};
use crate::progress::{format_duration, format_learning_rate, format_rate, one_line};

/// The status as a table of 80 columns, beyond which only a single long word reaches.
pub(crate) fn to_table(status: &Status) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        for (index, line) in wrap(value).into_iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            writeln!(text, "{}", format!("{name:<12} {line}").trim_end())
                .expect("a string takes any text");
        }
    };
    row("job", &status.job);
    // A master that has taken over a job without workers does not know its data.
    let progress = match status.step > 0 && status.progress == 0.0 {
        true => String::new(),
        false => format!(" ({:.1} %)", status.progress * 100.0),
    };
    row("state", &format!("{}{progress}", status.state));
    let epoch = (status.epoch.saturating_add(1)).min(status.epochs);
    row("epoch", &format!("{epoch} of {}", status.epochs));
    if let Some(ShardCounts { todo, leased, done }) = status.shards {
        row("shards", &format!("{todo} to do, {leased} leased, {done} done"));
    }
    row("step", &status.step.to_string());
    row("records", &format!("{} of {}", status.records_counted, status.records_expected));
    if let Some(loss) = status.loss {
        let rate = status.learning_rate.map(format_learning_rate);
        let rate = rate.map(|rate| format!(", learning rate {rate}")).unwrap_or_default();
        row("loss", &format!("{}{rate}", format_value(loss)));
    }
    for (name, mean) in &status.metrics {
        row("", &format!("{} {}", one_line(name), format_value(*mean)));
    }
    let left = status.eta_s.map(format_duration);
    let left = left.map(|left| format!(", {left} left")).unwrap_or_default();
    row("speed", &format!("{} records/s{left}", format_rate(status.records_per_s)));
    if let Some(allreduce_transport) = &status.allreduce_transport {
        row("all-reduce", &one_line(allreduce_transport));
    }
    if let Some(link) = &status.limiting_link {
        row("slow link", &one_line(&link.to_string()));
    }
    if let Some(audit) = &status.audit {
        row("audits", &audits(audit));
    }
    if let Some(TablesStatus { rows, touches, shards_at_risk }) = status.tables {
        let bytes = status.workers.iter().filter_map(|worker| worker.table_bytes).sum();
        let risk = match shards_at_risk {
            0 => String::new(),
            at_risk => format!(", {at_risk} parts have too few copies"),
        };
        let held = HumanBytes(bytes);
        // Rows are counted seldom, touches with each step.
        let rows = match rows {
            0 if touches > 0 => "rows not counted yet".to_owned(),
            rows => format!("{rows} rows"),
        };
        row("tables", &format!("{rows} in {held}, {touches} touches{risk}"));
    }
    row("generation", &status.generation.to_string());
    let spares = status.spares.map(|spares| format!(", {}", spares_text(&spares)));
    let spares = spares.unwrap_or_default();
    let limits = match status.workers_max {
        0 => String::new(),
        max => format!(" ({} to {max})", status.workers_min),
    };
    row("workers", &format!("{} desired{limits}{spares}", status.workers_desired));
    let in_pods = status.workers.iter().any(|worker| worker.pod.is_some());
    let has_leases = has_leases(&status.workers);
    if !status.workers.is_empty() {
        let process = if in_pods { "" } else { PROCESS_COLUMN };
        let of_job = if has_leases { LEASED_COLUMN } else { SHARE_COLUMNS };
        row("", &format!("worker{process}{WORKER_COLUMNS}{of_job}"));
    }
    for worker in &status.workers {
        row("", &worker_row(worker, in_pods, has_leases));
        if let Some(pod) = &worker.pod {
            let node = worker.node.as_deref().map(|node| format!(" on {node}"));
            row("", &format!("        {pod}{}", node.unwrap_or_default()));
        }
    }
    for (index, worker) in status.workers_disconnected.iter().enumerate() {
        row(if index == 0 { "disconnected" } else { "" }, &disconnected_row(worker));
    }
    for (index, launch) in status.workers_pending.iter().enumerate() {
        let reason = launch.reason.as_deref().map(|why| format!(": {}", one_line(why)));
        let what =
            format!("worker {} {}{}", launch.launch.0, launch.state, reason.unwrap_or_default());
        row(if index == 0 { "pending" } else { "" }, &what);
    }
    for (index, (host, report)) in status.hosts.iter().take(HOSTS_SHOWN).enumerate() {
        let what = one_line(&format!("{host} {report}"));
        row(if index == 0 { "hosts" } else { "" }, &what);
    }
    let more = status.hosts.len().saturating_sub(HOSTS_SHOWN);
    if more > 0 {
        row("", &format!("and {more} more"));
    }
    for (index, AvoidedHost { host, why, for_s }) in status.hosts_avoided.iter().enumerate() {
        let time = for_s.map(|left| format!(" (for {})", format_duration(left)));
        let what = format!("{host}{}: {}", time.unwrap_or_default(), one_line(why));
        row(if index == 0 { "avoided" } else { "" }, &what);
    }
    if let Some(found) = &status.autoscale {
        row("autoscale", &one_line(found));
    }
    if !status.priority_tiers.is_empty() {
        let tiers = status
            .priority_tiers
            .iter()
            .map(|r| format!("{} {}/{}", r.class, r.workers, r.launches));
        row("tiers", &tiers.collect::<Vec<_>>().join(", "));
    }
    if let Some(Evaluated { step, metrics, .. }) = &status.evaluated {
        row("evaluated", &format!("step {step}: {}", one_line(&format_metrics(metrics))));
    }
    if let Some(best) = &status.evaluated_best {
        row("best", &format!("step {}", best_value(best)));
    }
    if let Some(known) = &status.checkpoints {
        let is_over = matches!(&*status.state, "completed" | "failed" | "stopped");
        row("checkpoints", &checkpoints_row(known, is_over.then_some(status.step)));
    }
    let hidden = status.memberships.len().saturating_sub(MEMBERSHIPS_SHOWN);
    if !status.memberships.is_empty() {
        row("memberships", MEMBERSHIP_COLUMNS);
    }
    for record in &status.memberships[hidden..] {
        row("", &membership(record));
    }
    for (index, event) in status.events.iter().enumerate() {
        row(if index == 0 { "events" } else { "" }, &one_line(event));
    }
    text
}

/// `last`: step at which the job has ended.
fn checkpoints_row(known: &CheckpointsSummary, last: Option<u64>) -> String {
    let newest = known
        .newest
        .as_ref()
        .map_or_else(|| "none yet".into(), |newest| format!("step {}", newest.step));
    let error =
        known.error.as_deref().map(|error| format!("; the last one failed: {}", one_line(error)));
    let unsaved = last.and_then(|last| known.unsaved(last));
    let unsaved = unsaved.map(|(first, last)| format!("; steps {first} to {last} are in none"));
    let [error, unsaved] = [error, unsaved].map(Option::unwrap_or_default);
    format!("{newest} in {}{error}{unsaved}", known.dir.as_deref().unwrap_or_default())
}

/// What the spares do, and have done.
pub(super) fn spares_text(spares: &Spares) -> String {
    let Spares { desired, caught_up, promoted } = spares;
    let number = counted(u64::from(*desired), "spare");
    format!("{number} ({caught_up} caught up, {promoted} promoted)")
}

/// A worker without contact to the master.
fn disconnected_row(worker: &DisconnectedStatus) -> String {
    let DisconnectedStatus { worker, rank, disconnected_s } = worker;
    let rank = rank.map(|rank| format!(" (rank {rank})")).unwrap_or_default();
    format!("worker {worker}{rank} for {disconnected_s:.1} s")
}

/// One worker as a row. In a cluster the row lacks the process id, which is the same in all pods.
fn worker_row(worker: &WorkerStatus, in_pods: bool, has_leases: bool) -> String {
    let or_dash =
        |number: Option<u64>| number.map_or_else(|| "-".into(), |number| number.to_string());
    let process = if in_pods { String::new() } else { format!(" {:>7}", worker.pid) };
    let state = if worker.straggler { "straggler" } else { &worker.state };
    let of_job = if has_leases {
        format!("{:>14}", or_dash(worker.leased_records))
    } else {
        let share = worker.share.map(|part| format!("{:.0} %", part * 100.0));
        let limit = worker.limited_by.as_deref().unwrap_or("-");
        format!("{:>5}  {limit}", share.unwrap_or_else(|| "-".into()))
    };
    format!(
        "{:>6}{process}  {:>4}  {state:<10}  {:>8}  {:>7.1}  {of_job}",
        worker.worker,
        or_dash(worker.rank.map(u64::from)),
        or_dash(worker.step),
        worker.compute_us as f64 / 1000.0,
    )
}

/// The lines of a value that fit into a table of 80 columns. Those after the first are indented.
fn wrap(value: &str) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), value.trim_end().to_owned());
    loop {
        let indent = rest.len() - rest.trim_start().len();
        let end = rest.char_indices().nth(VALUE_COLUMNS).map(|(at, _)| at);
        let Some(end) = end else { break };
        // The last gap up to the end, else the first one after it.
        let gap = if rest[end..].starts_with(' ') { Some(end) } else { rest[..end].rfind(' ') };
        let gap = gap.filter(|gap| *gap > indent);
        let Some(gap) = gap.or_else(|| rest[end..].find(' ').map(|gap| end + gap)) else { break };
        let after = format!("  {}", rest[gap..].trim_start());
        rest.truncate(gap);
        lines.push(std::mem::replace(&mut rest, after));
    }
    lines.push(rest);
    lines
}

/// Whether records are leased to workers, as in an inference job.
fn has_leases(workers: &[WorkerStatus]) -> bool {
    workers.iter().any(|worker| worker.leased_records.is_some())
}

const MEMBERSHIPS_SHOWN: usize = 5;
const HOSTS_SHOWN: usize = 16;
const PROCESS_COLUMN: &str = "     pid";
const WORKER_COLUMNS: &str = "  rank  state           step  ms/step  ";
const SHARE_COLUMNS: &str = "share  limit";
const LEASED_COLUMN: &str = "records leased";
/// Columns of a value: 80 less those of the row's name.
const VALUE_COLUMNS: usize = 67;

#[cfg(test)]
pub(crate) mod tests {
    use elasticdl_proto::{
        AuditSummary, Cause, Generation, HostReport, LaunchId, LaunchStatus, LimitingLink,
        MembershipChange, PriorityTierStatus, SavedCheckpoint, WorkerId,
    };

    use super::*;

    pub(crate) fn reply() -> Status {
        let worker = |worker, rank: Option<u32>| WorkerStatus {
            worker: WorkerId(worker),
            pid: 70 + worker as u32,
            rank,
            state: "training".into(),
            compute_us: 1500,
            share: rank.map(|_| 0.5),
            input_us: 100,
            limited_by: rank.map(|_| "compute".into()),
            leased_records: None,
            step: rank.map(|_| 10),
            straggler: worker == 1,
            cpu: None,
            memory_bytes: None,
            serves_tables: false,
            table_bytes: None,
            pod: None,
            node: None,
        };
        let membership = |generation| MembershipChange {
            generation: Generation(generation),
            cause: Cause::Lost,
            world_size: 2,
            at_step: 9,
            lost: vec![WorkerId(3)],
            left: vec![WorkerId(4)],
            joined: vec![WorkerId(5)],
            ..MembershipChange::default()
        };
        let recovered = MembershipChange {
            gap_ms: Some(3.0),
            detect_ms: Some(0.1),
            abort_ms: Some(0.2),
            agree_ms: Some(0.3),
            connect_ms: Some(0.4),
            state_ms: Some(0.5),
            first_step_ms: Some(1.5),
            ..membership(2)
        };
        let tier = |class: &str, launches, workers| PriorityTierStatus {
            class: class.into(),
            launches,
            workers,
        };
        Status {
            job: "mnist".into(),
            run_id: "00000000-0000-0000-0000-000000000007".into(),
            state: "running".into(),
            generation: Generation(2),
            step: 10,
            epochs: 3,
            records_counted: 640,
            records_expected: 1920,
            loss: Some(0.25),
            metrics: [("accuracy".into(), 0.5)].into(),
            learning_rate: Some(0.001),
            eta_s: Some(64.0),
            records_per_s: 20_000.0,
            workers_desired: 2,
            spares: Some(Spares { desired: 2, caught_up: 1, promoted: 3 }),
            autoscale: Some("2 workers make 20000 records/s; trying 3".into()),
            workers: vec![worker(1, Some(0)), worker(2, None)],
            events: vec!["generation 2: 1 worker".into()],
            progress: 1.0 / 3.0,
            memberships: vec![membership(1), recovered],
            events_emitted: 7,
            workers_disconnected: vec![DisconnectedStatus {
                worker: WorkerId(9),
                rank: Some(1),
                disconnected_s: 12.34,
            }],
            workers_pending: vec![LaunchStatus {
                launch: LaunchId(3),
                slot: 2,
                state: "unschedulable".into(),
                reason: Some("0/1 nodes are available".into()),
            }],
            hosts: [("node-2".into(), HostReport { copied_per_s: 9 << 30, ..Default::default() })]
                .into(),
            hosts_avoided: vec![AvoidedHost {
                host: "node-3".into(),
                why: "3 faults, the last one: worker 5 was lost".into(),
                for_s: Some(9000.0),
            }],
            priority_tiers: vec![tier("elasticdl-core", 2, 2), tier("elasticdl-tier-1", 1, 0)],
            allreduce_transport: Some("TCP".into()),
            limiting_link: Some(LimitingLink {
                from: WorkerId(1),
                from_host: Some("node-2".into()),
                to: WorkerId(2),
                to_host: Some("node-3".into()),
                host: None,
                limited: 0.75,
                bytes_per_s: 12_340_000.0,
            }),
            audit: Some(AuditSummary { steps: 3, disagreements: 0, workers_replaced: 0 }),
            evaluated: Some(Evaluated {
                step: 9,
                records: 50,
                metrics: [("loss".into(), Some(0.5)), ("accuracy".into(), Some(0.75))].into(),
            }),
            checkpoints: Some(CheckpointsSummary {
                dir: Some("s3://b/c".into()),
                newest: Some(SavedCheckpoint { step: 9, name: "step-9".into(), bytes: 400 }),
                saved: 2,
                failed: 1,
                error: Some("disk full".into()),
                ..CheckpointsSummary::default()
            }),
            ..Status::default()
        }
    }

    #[test]
    fn the_table_shows_the_whole_status() {
        let expected = "\
job          mnist
state        running (33.3 %)
epoch        1 of 3
step         10
records      640 of 1920
loss         0.2500, learning rate 0.001
             accuracy 0.5000
speed        20.0 k records/s, 64 s left
all-reduce   TCP
slow link    the link from worker 1 on node-2 to worker 2 on node-3 limits the
               steps: the network delivers 12.3 MB/s
audits       3 steps computed twice, no disagreement
generation   2
workers      2 desired, 2 spares (1 caught up, 3 promoted)
             worker     pid  rank  state           step  ms/step  share  limit
                  1      71     0  straggler         10      1.5   50 %  compute
                  2      72     -  training           -      1.5      -  -
disconnected worker 9 (rank 1) for 12.3 s
pending      worker 3 unschedulable: 0/1 nodes are available
hosts        node-2 copies 9.7 GB/s in memory, 0 GPUs
avoided      node-3 (for 2 h 30 min): 3 faults, the last one: worker 5 was lost
autoscale    2 workers make 20000 records/s; trying 3
tiers        elasticdl-core 2/2, elasticdl-tier-1 0/1
evaluated    step 9: accuracy 0.7500, loss 0.5000
checkpoints  step 9 in s3://b/c; the last one failed: disk full
memberships  generation  cause  workers     at step     gap ms
                      1  lost         2           9          -
                      2  lost         2           9        3.0  (detect 0.1,
               abort 0.2, agree 0.3, connect 0.4, state 0.5, first step 1.5)
events       generation 2: 1 worker
";
        assert_eq!(to_table(&reply()), expected);
        let stopped = to_table(&Status { state: "stopped".into(), step: 12, ..reply() });
        let stopped = stopped.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(stopped.contains("disk full; steps 10 to 12 are in none memberships"), "{stopped}");
    }

    #[test]
    fn tables_show_their_rows_and_what_is_at_risk() {
        let mut status = reply();
        status.workers.iter_mut().for_each(|worker| worker.table_bytes = Some(3 << 20));
        for (shards_at_risk, risk) in [(0, ""), (7, ", 7 parts have too few copies")] {
            status.tables = Some(TablesStatus { rows: 90, touches: 400, shards_at_risk });
            let line = format!("tables       90 rows in 6.00 MiB, 400 touches{risk}\n");
            assert!(to_table(&status).contains(&line), "{}", to_table(&status));
        }
        status.tables = Some(TablesStatus { rows: 0, touches: 400, shards_at_risk: 0 });
        let text = to_table(&status);
        assert!(text.contains("rows not counted yet in 6.00 MiB, 400 touches\n"), "{text}");
    }

    #[test]
    fn a_job_of_100_workers_fits_into_80_columns() {
        let (small, mut workers) = (reply(), Vec::new());
        for number in 0..100_u32 {
            workers.push(WorkerStatus {
                worker: WorkerId(1000 + u64::from(number)),
                pid: 4_194_304 - number,
                rank: Some(number),
                step: Some(12_345_678),
                compute_us: 12_345_600,
                share: Some(1.0),
                limited_by: Some(["compute", "input", "network"][number as usize % 3].into()),
                straggler: number == 7,
                ..small.workers[0].clone()
            });
        }
        let gang = "0/100 nodes are available: 40 Insufficient nvidia.com/gpu, 60 node(s) had \
                    untolerated taint {dedicated: serving}";
        let pending =
            LaunchStatus { reason: Some(gang.into()), ..small.workers_pending[0].clone() };
        let tier = |i| PriorityTierStatus {
            class: format!("elasticdl-tier-{i}"),
            launches: 9,
            workers: 9,
        };
        let local = Status {
            workers,
            workers_pending: vec![pending],
            priority_tiers: (1..=10).map(tier).collect(),
            events: vec![format!("generation 7: worker 1007 lost; {gang}")],
            ..small
        };
        let mut cluster = local.clone();
        for worker in &mut cluster.workers {
            worker.pod = Some(format!("recommendations-nightly-worker-{}", worker.worker));
            worker.node = Some("ip-10-0-113-27.eu-central-1.compute.internal".into());
        }
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for status in [&local, &cluster] {
            let table = to_table(status);
            let wide: Vec<&str> = table.lines().filter(|line| line.chars().count() > 80).collect();
            assert_eq!(wide, [""; 0]);
            assert_eq!(table.matches("straggler").count(), 1);
            // What is wrapped is whole.
            assert!(words(&table).windows(words(gang).len()).any(|part| part == words(gang)));
        }
        let one = "x".repeat(100);
        assert_eq!(wrap(&format!("a {one} b")), ["a", &format!("  {one}"), "  b"]);
    }

    #[test]
    fn an_inference_job_is_shown_with_its_shards_and_leases() {
        let mut status = reply();
        status.shards = Some(ShardCounts { todo: 5, leased: 3, done: 2 });
        status.workers.truncate(1);
        status.workers[0].leased_records = Some(64);
        status.workers[0].state = "evaluating".into();
        let table = to_table(&status);
        let expected = "\
             worker     pid  rank  state           step  ms/step  records leased
                  1      71     0  straggler         10      1.5              64
";
        assert!(table.contains("\nshards       5 to do, 3 leased, 2 done\n"), "{table}");
        assert!(table.contains(expected), "{table}");
    }

    #[test]
    fn workers_in_a_cluster_are_shown_with_their_pods_and_nodes() {
        let mut status = reply();
        status.workers[0].pod = Some("mnist-w-1".into());
        status.workers[0].node = Some("node-7".into());
        let table = to_table(&status);
        let expected = "\
             worker  rank  state           step  ms/step  share  limit
                  1     0  straggler         10      1.5   50 %  compute
                     mnist-w-1 on node-7
                  2     -  training           -      1.5      -  -
";
        assert!(table.contains(expected), "{table}");
    }

    #[test]
    fn the_table_shows_the_newest_memberships_and_json_shows_all() {
        let one = reply().memberships.remove(0);
        let many = (1..=20)
            .map(Generation)
            .map(|generation| MembershipChange { generation, ..one.clone() });
        let status = Status { memberships: many.collect(), ..reply() };
        let shown = to_table(&status).lines().filter(|line| line.contains("  lost  ")).count();
        assert_eq!((shown, status.memberships.len()), (5, 20));
    }
}
