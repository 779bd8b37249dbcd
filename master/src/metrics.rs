//! A job's Prometheus metrics, served as text over HTTP, in the format that the scraper accepts.
//!
//! The text is a projection of one [`Snapshot`], made for each scrape: nothing is counted twice,
//! and a job that is not scraped has no cost. The crate `prometheus-client` of the Prometheus
//! project writes it, so that names, escapes and histograms have the form that scrapers expect.
//!
//! **Invariant:** the endpoint is read-only and needs no authentication, as is usual for metrics:
//! they contain no secrets.

mod server;

use std::collections::BTreeSet;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

pub(crate) use server::{HEALTH, READY, Ready, serve};

use crate::job::{End, Histogram, Recoveries, Snapshot};

/// The snapshot in the OpenMetrics text format.
pub(crate) fn to_text(snapshot: &Snapshot) -> String {
    let labels = [("training_job".into(), snapshot.status.job.clone().into())];
    let mut registry = Registry::with_prefix_and_labels("elasticdl", labels.into_iter());
    registry.register_collector(Box::new(Projection(snapshot.clone())));
    let mut page = String::new();
    text::encode(&mut page, &registry).expect("a string takes any text");
    page
}

/// The snapshot in the older text format of Prometheus, version 0.0.4: counters are declared with
/// their suffix, and there is no end mark.
pub(crate) fn to_plain_text(snapshot: &Snapshot) -> String {
    let page = to_text(snapshot);
    let counters: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut plain = String::with_capacity(page.len());
    for line in page.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                plain.push_str(&format!("# {what} {name}_total {rest}\n"));
            }
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

#[derive(Debug)]
struct Projection(Snapshot);

impl Collector for Projection {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.encode_state(&mut page)?;
        self.encode_counts(&mut page)?;
        self.encode_recoveries(&mut page)
    }
}

impl Projection {
    /// Gauges of the job's state. Some decrease when all workers are lost and training restarts
    /// from an earlier step.
    fn encode_state(&self, page: &mut Page<'_>) -> fmt::Result {
        let status = &self.0.status;
        let members = status.members();
        let stragglers = status.workers.iter().filter(|worker| worker.straggler).count();
        page.gauges("state", "1 for the current state of the job", |labels| {
            labels.set("state", &status.state, 1.0)
        })?;
        page.gauge("generation", "Current generation of the group", status.generation.0 as f64)?;
        page.gauge("world_size", "Number of members of the group", members.count() as f64)?;
        page.gauge(
            "workers_desired",
            "Number of workers to keep running",
            f64::from(status.workers_desired),
        )?;
        if let Some(spares) = &status.spares {
            let help = "Spares that can take the place of a lost worker at once";
            page.gauge("spares_caught_up", help, spares.caught_up.into())?;
            let help = "Spares that have taken the place of a lost or leaving worker";
            page.gauge("spares_promoted", help, spares.promoted as f64)?;
        }
        page.gauge(
            "workers_disconnected",
            "Workers without contact to the master that are not lost",
            status.workers_disconnected.len() as f64,
        )?;
        page.gauge(
            "stragglers",
            "Members that are markedly slower than their peers",
            stragglers as f64,
        )?;
        page.gauge("step", "Steps committed", status.step as f64)?;
        page.gauge("epoch", "First epoch that is not complete, from 0", f64::from(status.epoch))?;
        page.gauge(
            "records_counted",
            "Records absorbed by the parameters",
            status.records_counted as f64,
        )?;
        page.gauge("records_expected", "Records of all epochs", status.records_expected as f64)?;
        page.gauge(
            "records_per_second",
            "Records committed per second, over the last seconds",
            status.records_per_s,
        )?;
        page.gauge("progress", "Progress of the job, 0 to 1", status.progress)?;
        let help = "Committed steps that were skipped because a gradient or loss was not finite";
        page.gauge("steps_skipped", help, status.steps_skipped as f64)?;
        if let Some(loss) = status.loss {
            page.gauge("loss", "Mean loss per record, smoothed over the last reports", loss)?;
        }
        if !status.metrics.is_empty() {
            let help = "Mean of each metric of the program, smoothed over the last reports";
            page.gauges("training", help, |labels| {
                let mut known = status.metrics.iter();
                known.try_for_each(|(name, mean)| labels.set("metric", name, *mean))
            })?;
        }
        if let Some(rate) = status.learning_rate {
            page.gauge("learning_rate", "Learning rate of the last step", rate)?;
        }
        if let Some(tables) = &status.tables {
            page.gauge("table_rows", "Rows of the model's tables", tables.rows as f64)?;
            let help = "Touches of rows of tables by the records in committed steps";
            page.gauge("row_touches", help, tables.touches as f64)?;
            let help = "Shards of tables with fewer copies than there could be";
            page.gauge("table_shards_at_risk", help, tables.shards_at_risk.into())?;
            page.gauges("table_bytes", "Memory of a worker's rows of tables", |labels| {
                let mut held = status.workers.iter().filter_map(|w| Some((w, w.table_bytes?)));
                held.try_for_each(|(worker, bytes)| {
                    labels.set("worker", &worker.worker.to_string(), bytes as f64)
                })
            })?;
        }
        if let Some(evaluated) = &status.evaluated {
            page.gauge("validation_step", "Step of the newest evaluation", evaluated.step as f64)?;
            page.gauges("validation", "Mean of each metric in the newest evaluation", |labels| {
                let mut known =
                    evaluated.metrics.iter().filter_map(|(name, mean)| Some((name, (*mean)?)));
                known.try_for_each(|(name, mean)| labels.set("metric", name, mean))
            })?;
        }
        let Some(shards) = status.shards else { return Ok(()) };
        let leased: u64 = status.workers.iter().filter_map(|worker| worker.leased_records).sum();
        page.gauge("leased_records", "Records of the shards that are leased", leased as f64)?;
        page.gauges("shards", "Shards of an evaluate or predict job by state", |labels| {
            labels.set("state", "todo", shards.todo.into())?;
            labels.set("state", "leased", shards.leased.into())?;
            labels.set("state", "done", shards.done.into())
        })
    }

    fn encode_counts(&self, page: &mut Page<'_>) -> fmt::Result {
        let tally = &self.0.counters;
        let seconds = |us: u64| us as f64 / 1e6;
        page.counter("steps", "Steps committed since the master started", tally.steps as f64)?;
        page.counter(
            "records",
            "Records committed since the master started",
            tally.records as f64,
        )?;
        page.counter(
            "timed_steps",
            "Timed steps: all except the first of each generation",
            tally.times.steps as f64,
        )?;
        let help = "Duration of timed steps from commit to commit, on the lowest rank";
        page.counter("step_seconds", help, seconds(tally.times.step_us))?;
        let help = "Part of step_seconds in the all-reduce: wait for slower ranks, and transfer";
        page.counter("all_reduce_seconds", help, seconds(tally.times.reduce_us))?;
        page.counter("worker_restarts", "Workers started as replacements", tally.restarts as f64)?;
        let help = "Failures of workers that count against --max-worker-restarts";
        page.counter("worker_failures", help, tally.failures as f64)?;
        let help = "Time that workers have waited for unresponsive storage, summed over workers";
        page.counter("storage_wait_seconds", help, tally.storage_wait.as_secs_f64())?;
        let help =
            "Losses of the trained state: all workers were lost, and there was no checkpoint";
        page.counter("state_losses", help, tally.state_losses as f64)?;
        let mut exits = page.family(
            "worker_exits",
            "Worker processes that have exited, by reason",
            MetricType::Counter,
        )?;
        for end in End::ALL {
            let count = tally.ends.get(&end).copied().unwrap_or_default();
            let labels = [("reason", end.name())];
            exits.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&count, None)?;
        }
        Ok(())
    }

    fn encode_recoveries(&self, page: &mut Page<'_>) -> fmt::Result {
        let recoveries = &self.0.counters.recoveries;
        let help =
            "Time from the last commit before a membership change to the first commit after it";
        let mut gaps = page.family("recovery_seconds", help, MetricType::Histogram)?;
        for (cause, Recoveries { gap, .. }) in recoveries {
            encode_histogram(&mut gaps, &[("cause", cause.name())], gap)?;
        }
        let help = "Phases of recovery_seconds";
        let mut parts = page.family("recovery_phase_seconds", help, MetricType::Histogram)?;
        for (cause, Recoveries { phases, .. }) in recoveries {
            for (phase, histogram) in PHASES.into_iter().zip(phases) {
                encode_histogram(
                    &mut parts,
                    &[("cause", cause.name()), ("phase", phase)],
                    histogram,
                )?;
            }
        }
        Ok(())
    }
}

/// Encoder of one scrape.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn family<'a>(
        &'a mut self,
        name: &'a str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'a>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(name, help, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        each: impl FnOnce(&mut Labelled<'_>) -> fmt::Result,
    ) -> fmt::Result {
        each(&mut Labelled(self.family(name, help, MetricType::Gauge)?))
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, f64>(&value, None)
    }
}

/// Gauges of one family that differ in a label.
struct Labelled<'a>(MetricEncoder<'a>);

impl Labelled<'_> {
    fn set(&mut self, label: &str, label_value: &str, value: f64) -> fmt::Result {
        self.0.encode_family(&[(label, label_value)])?.encode_gauge(&value)
    }
}

fn encode_histogram(
    family: &mut MetricEncoder<'_>,
    labels: &impl EncodeLabelSet,
    histogram: &Histogram,
) -> fmt::Result {
    let bounds = Histogram::BOUNDS_MS.iter().map(|ms| ms / 1000.0).chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(histogram.buckets).collect();
    let (sum, count) = (histogram.sum_ms / 1000.0, histogram.count());
    family.encode_family(labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
}

/// Values of the label `phase`, in the order of
/// [`MembershipChange::phases`](crate::job::MembershipChange::phases).
const PHASES: [&str; 6] = ["detect", "abort", "agree", "connect", "state", "first_step"];

#[cfg(test)]
mod tests;
