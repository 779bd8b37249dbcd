//! The summary of an ended job, as a table and as JSON.

use std::path::Path;

use elasticdl_master::job::{
    AuditSummary, BestEvaluation, CheckpointsSummary, EvaluationsSummary, FailedShard,
    MembershipChange, RowsLoss, StateLoss, Summary, counted, format_metrics, format_value,
};

use crate::process::unsaved_steps;
use crate::progress::{format_rate, one_line};

/// Paths of further output on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paths<'a> {
    /// Folder of the logs.
    pub(crate) logs: Option<&'a Path>,
    /// File of the summary.
    pub(crate) summary: Option<&'a Path>,
}

/// The summary as a table.
pub(crate) fn to_table(summary: &Summary, paths: Paths<'_>) -> String {
    let mut text = String::new();
    let out = &mut text;
    let losses = [
        summary.state_lost.as_ref().map(|lost| state_lost(lost, summary)),
        summary.rows_lost.as_ref().map(rows_lost),
    ];
    losses.into_iter().flatten().for_each(|lost| line(out, &lost));
    line(out, &format!("job {}: {} after {:.2} s", summary.job, summary.state, summary.wall_s));
    if let Some(error) = &summary.error {
        row(out, "error", &one_line(error));
    }
    if let Some(reason) = &summary.stop_reason {
        row(out, "stopped by", &one_line(reason));
    }
    if summary.state == "refused" {
        write_paths(out, paths);
        return text;
    }
    let records = &summary.records;
    row(
        out,
        "steps",
        &format!("{} ({} complete)", summary.steps, counted(summary.epochs.into(), "epoch")),
    );
    let mut counts = format!(
        "{} expected, {} counted, {} missing, {} repeated",
        records.expected, records.counted, records.missing, records.repeated
    );
    if records.not_trained > 0 {
        // Jobs without groups do not train.
        let what = if summary.memberships.is_empty() { "left over" } else { "not trained" };
        counts += &format!(", {} {what}", records.not_trained);
    }
    row(out, "records", &counts);
    if let Some(touches) = &summary.row_touches {
        let elasticdl_proto::RowTouchesSummary { expected, counted, missing, repeated } = touches;
        row(
            out,
            "row touches",
            &format!(
                "{expected} expected, {counted} counted, {missing} missing, {repeated} repeated"
            ),
        );
    }
    if summary.steps_skipped > 0 {
        let skipped = counted(summary.steps_skipped, "step");
        row(out, "skipped", &format!("{skipped} with a gradient or loss that was not finite"));
    }
    if let Some(audit) = &summary.audit {
        row(out, "audits", &audits(audit));
    }
    if let (Some(first), Some(last)) = (summary.loss.first, summary.loss.last) {
        row(out, "loss", &format!("{} -> {}", format_value(first), format_value(last)));
    }
    for (name, mean) in &summary.training_metrics {
        row(out, "", &format!("{} {}", one_line(name), format_value(*mean)));
    }
    let rate = &summary.throughput;
    row(
        out,
        "throughput",
        &format!(
            "{} records/s, {:.1} steps/s, all-reduce {:.1} ms",
            format_rate(rate.records_per_s),
            rate.steps_per_s,
            rate.all_reduce_ms
        ),
    );
    if rate.storage_wait_s > 0.0 {
        let waited = format!("workers waited for it for {:.1} s in total", rate.storage_wait_s);
        row(out, "storage", &waited);
    }
    let workers = &summary.workers;
    let restarts = counted(workers.restarts, "restart");
    let shown = |servers: u32| format!("; {} to keep", counted(servers.into(), "table server"));
    let servers = Some(workers.table_servers).filter(|n| *n > 0).map(shown).unwrap_or_default();
    let spares = workers.spares.map(|spares| {
        let number = counted(spares.desired.into(), "spare");
        format!("; {number} to keep, {} promoted", spares.promoted)
    });
    let spares = spares.unwrap_or_default();
    let (peak, last) = (workers.peak, workers.last);
    let counts = format!("peak {peak}, final {last}, {restarts}{servers}{spares}");
    row(out, "workers", &counts);
    if let Some(digest) = &summary.digest {
        row(out, "digest", digest);
    }
    if let Some(known) = &summary.evaluations {
        row(out, "evaluations", &evaluations(known));
    }
    let best = summary.evaluations.as_ref().and_then(|known| known.best.as_ref());
    if let Some(path) = best.and_then(|best| best.export.as_deref()) {
        row(out, "best model", &one_line(path));
    }
    if let Some(kept) = summary.evaluations.as_ref().and_then(|known| known.kept.as_ref()) {
        let value = kept.value.map(|value| format!(" ({})", format_value(value)));
        let earlier = kept.address.clone() + &value.unwrap_or_default();
        row(out, "earlier one", &one_line(&earlier));
    }
    if let Some(known) = &summary.checkpoints {
        row(out, "checkpoints", &checkpoints(known, unsaved_steps(summary)));
    }
    write_memberships(out, &summary.memberships);
    if let Some(skipped) = &summary.records_skipped {
        let mut counts = format!("{} bad, {} with nulls", skipped.bad, skipped.nulls);
        if skipped.files > 0 {
            let (files, first) = (skipped.files, &skipped.first_file);
            counts += &format!("; other files in the folder: {files}, the first: {first}");
        }
        row(out, "skipped", &one_line(&counts));
        for text in &skipped.first {
            line(out, &format!("    {}", one_line(text)));
        }
    }
    write_failed_shards(out, &summary.failed_shards);
    if let Some(words) = &summary.model_summary {
        row(out, "model", "");
        for words in words.lines() {
            line(out, &format!("    {}", one_line(words)));
        }
    }
    if summary.metrics.is_some() {
        row(out, "metrics", "");
        for text in metrics(summary) {
            line(out, &format!("    {text}"));
        }
    }
    if let Some(path) = &summary.output {
        row(out, "predictions", &one_line(path));
    }
    if let Some(path) = &summary.export {
        row(out, "exported to", &one_line(path));
    }
    if let Some(error) = &summary.tracking_error {
        row(out, "not tracked", &one_line(error));
    }
    write_paths(out, paths);
    text
}

fn write_paths(out: &mut String, paths: Paths<'_>) {
    for (name, path) in [("logs", paths.logs), ("summary", paths.summary)] {
        if let Some(path) = path {
            row(out, name, &path.display().to_string());
        }
    }
}

/// The metrics of an evaluated model, one a line.
pub(crate) fn metrics(summary: &Summary) -> impl Iterator<Item = String> + '_ {
    summary.metrics.iter().flatten().map(|(name, mean)| {
        let mean = mean.map_or_else(|| "not finite".into(), |mean| mean.to_string());
        format!("{} {mean}", one_line(name))
    })
}

/// Warnings that are also printed with `--quiet`. `has_table`: the table, whose first lines say
/// what is lost, is printed.
pub(crate) fn warnings(summary: &Summary, has_table: bool) -> Vec<String> {
    let lost = summary.state_lost.as_ref().map(|lost| state_lost(lost, summary));
    let lost = lost.filter(|_| !has_table);
    let rows = summary.rows_lost.as_ref().filter(|_| !has_table).map(rows_lost);
    let failed = summary.checkpoints.as_ref().and_then(|known| {
        let newest = known.newest.as_ref().zip(known.newest_address());
        let newest = newest.map(|(newest, address)| {
            format!("; the newest one is from step {}: {}", newest.step, one_line(&address))
        });
        let newest = newest.unwrap_or_else(|| "; there is none".into());
        match (&known.error, unsaved_steps(summary)) {
            (Some(error), lost) => {
                let lost = lost
                    .map(|(first, last)| format!("; the state of steps {first} to {last} is lost"))
                    .unwrap_or_default();
                let error = one_line(error);
                Some(format!("the last checkpoint could not be written: {error}{newest}{lost}"))
            }
            (None, Some((first, last))) if summary.state_lost.is_none() => {
                Some(format!("steps {first} to {last} are in no checkpoint{newest}"))
            }
            (None, _) => None,
        }
    });
    let skipped = (summary.steps_skipped > 0).then(|| {
        format!(
            "{} skipped because a gradient or loss was not finite",
            counted(summary.steps_skipped, "step")
        )
    });
    let untracked = summary.tracking_error.as_ref();
    let untracked = untracked
        .map(|error| format!("not all metrics or traces are exported: {}", one_line(error)));
    let best = summary.evaluations.as_ref().and_then(|known| known.export_error.as_deref());
    let best = best.map(|error| format!("the best model was not exported: {}", one_line(error)));
    [lost, rows, failed, best, skipped, untracked].into_iter().flatten().collect()
}

fn state_lost(lost: &StateLoss, summary: &Summary) -> String {
    let StateLoss { count, at_step, steps, records } = lost;
    let was_stopped = summary.state == "stopped" && *at_step == summary.steps;
    let are_rows = summary.rows_lost.is_some_and(|rows| rows.at_step >= *at_step);
    let why = match (was_stopped, are_rows) {
        (true, _) => "the job was ended at once",
        (false, true) => "all copies of rows were lost",
        (false, false) => "all workers were lost",
    };
    let times = times(*count);
    let in_all = match count {
        ..=1 => String::new(),
        _ => format!("; {} of {records} records in all", counted(*steps, "step")),
    };
    format!("STATE LOST{times} at step {at_step}: {why}, and there was no checkpoint{in_all}")
}

fn rows_lost(lost: &RowsLoss) -> String {
    let RowsLoss { count, at_step, row_touches, missing } = lost;
    if (*row_touches, *missing) == (0, None) {
        let times = times(*count);
        return format!(
            "PARTS LOST{times} at step {at_step}: all copies of parts of the state were lost with \
             their workers; the group went back to the newest checkpoint"
        );
    }
    let what = match missing {
        None => format!(", and {row_touches} touches of rows that no checkpoint has"),
        Some(missing) => format!(
            "; training went on with older ones, in which {missing} touches of rows are missing"
        ),
    };
    let times = times(*count);
    format!(
        "ROWS LOST{times} at step {at_step}: all copies of rows were lost with their workers{what}"
    )
}

pub(super) fn audits(found: &AuditSummary) -> String {
    let AuditSummary { steps, disagreements, workers_replaced } = *found;
    let steps = format!("{} computed twice", counted(steps, "step"));
    match disagreements {
        0 => format!("{steps}, no disagreement"),
        _ => format!(
            "{steps}, {}, {} replaced",
            counted(disagreements, "disagreement"),
            counted(workers_replaced, "worker")
        ),
    }
}

fn times(count: u64) -> String {
    if count > 1 { format!(" ({count} times; the last time)") } else { String::new() }
}

fn evaluations(known: &EvaluationsSummary) -> String {
    let last = known
        .all
        .last()
        .map(|e| format!("step {}: {}", e.step, one_line(&format_metrics(&e.metrics))));
    let mut parts = vec![last.unwrap_or_else(|| "none".into())];
    parts.extend(known.best.as_ref().map(|b| format!("best at step {}", best_value(b))));
    parts.extend(known.stopped_early.then(|| "stopped early".into()));
    parts.join("; ")
}

/// The step and the value of the best evaluation.
pub(super) fn best_value(best: &BestEvaluation) -> String {
    format!("{}: {} {}", best.step, one_line(&best.metric), format_value(best.value))
}

fn checkpoints(known: &CheckpointsSummary, unsaved: Option<(u64, u64)>) -> String {
    let newest = known.newest.as_ref().map(|newest| format!("newest from step {}", newest.step));
    let mut parts = vec![format!("{} written", known.saved)];
    parts.extend(newest);
    parts.extend(unsaved.map(|(first, last)| format!("steps {first} to {last} are in none")));
    parts.extend((known.failed > 0).then(|| format!("{} failed", known.failed)));
    parts.extend(known.error.as_ref().map(|error| format!("last error: {}", one_line(error))));
    parts.extend((known.damaged > 0).then(|| format!("{} damaged", known.damaged)));
    for restored in &known.restored {
        let lost = counted(restored.lost_steps, "step");
        parts.push(format!("resumed from step {} ({lost} lost)", restored.step));
    }
    parts.join(", ")
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

fn row(out: &mut String, name: &str, value: &str) {
    line(out, format!("  {name:<13} {value}").trim_end());
}

/// One line for the shards of each error, with the first of them: those of a step have one error,
/// and are single records if the order is shuffled.
fn write_failed_shards(out: &mut String, failed: &[FailedShard]) {
    let is_one = |a: &FailedShard, b: &FailedShard| {
        (&a.error, a.worker, a.epoch) == (&b.error, b.worker, b.epoch)
    };
    let errors: Vec<_> = failed.chunk_by(is_one).collect();
    for shards in errors.iter().take(ERRORS_MAX) {
        let FailedShard { worker, epoch, error, .. } = &shards[0];
        let mut named: Option<&str> = None;
        let ranges = shards.iter().take(FAILED_SHARDS_MAX).map(|shard| {
            let FailedShard { file, start, end, .. } = shard;
            let range = format!("{start}..{end}");
            if named.replace(file) == Some(file) {
                range
            } else {
                format!("{file} records {range}")
            }
        });
        let mut what = ranges.collect::<Vec<_>>().join(", ");
        if let more @ 1.. = shards.len().saturating_sub(FAILED_SHARDS_MAX) {
            what += &format!(" and {more} more");
        }
        what += &format!(" (epoch {epoch}) on worker {worker}: {error}");
        row(out, "failed shard", &one_line(&what));
    }
    let more: usize = errors.iter().skip(ERRORS_MAX).map(|shards| shards.len()).sum();
    if more > 0 {
        row(out, "", &format!("({more} more are in failed_shards of the summary)"));
    }
}

fn write_memberships(out: &mut String, memberships: &[MembershipChange]) {
    if memberships.is_empty() {
        return;
    }
    row(out, "memberships", MEMBERSHIP_COLUMNS);
    let hidden = memberships.len().saturating_sub(MEMBERSHIPS_MAX);
    if hidden > 0 {
        row(out, "", &format!("({hidden} earlier ones are in the summary)"));
    }
    for record in &memberships[hidden..] {
        row(out, "", &membership(record));
    }
}

/// One membership change as a table row.
pub(crate) fn membership(record: &MembershipChange) -> String {
    let cause = record.cause.name();
    let gap = record.gap_ms.map_or_else(|| "-".into(), |gap| format!("{gap:.1}"));
    let phases = record.phases().into_iter();
    let phases: Vec<String> =
        phases.filter_map(|(name, ms)| ms.map(|ms| format!("{name} {ms:.1}"))).collect();
    let phases =
        if phases.is_empty() { String::new() } else { format!("  ({})", phases.join(", ")) };
    format!(
        "{:>10}  {cause:<5}  {:>7}  {:>10}  {gap:>9}{phases}",
        record.generation.0, record.world_size, record.at_step
    )
}

/// Column headings of [`membership`].
pub(crate) const MEMBERSHIP_COLUMNS: &str = "generation  cause  workers     at step     gap ms";
const MEMBERSHIPS_MAX: usize = 20;
const ERRORS_MAX: usize = 4;
const FAILED_SHARDS_MAX: usize = 4;

#[cfg(test)]
mod tests;
