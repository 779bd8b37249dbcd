//! The dashboard of a local job: its start, its link, and what users request through it.

use std::net::SocketAddr;
use std::time::Instant;

use crate::dashboard::{
    Dashboard, DashboardKey, JobOptions, PageCommand, PageRequest, ScaleLimits, Served,
};
use crate::event_loop::{Inspector, UserCommand};
use crate::job::{JobSpec, Snapshot, Time};
use crate::jobdir::JobDir;
use crate::progress::Progress;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tracing::info;

use super::signals::{Stop, StopEscalation};
use crate::exit::{Failure, cannot};

/// The dashboard of a local job, which records the job's history even if it is not served.
#[derive(Debug)]
pub(super) struct LocalPage {
    dashboard: Dashboard,
    key: DashboardKey,
}

impl LocalPage {
    /// Starts the dashboard of the job in `dir`. Also returns what users request through it.
    pub(super) fn start(
        listener: Option<TcpListener>,
        spec: &JobSpec,
        dir: &JobDir,
        job: JobOptions,
        known: watch::Receiver<Option<Snapshot>>,
    ) -> Result<(Self, mpsc::Receiver<PageRequest>), Failure> {
        let key = DashboardKey::of(dir.token());
        let (requests, requested) = mpsc::channel(REQUESTS_MAX);
        let served = listener.map(|listener| Served {
            listener,
            key: key.clone(),
            scale: ScaleLimits::from(spec),
            requests,
        });
        let dashboard = Dashboard::start(known, job, dir.history_path(), served)
            .map_err(cannot("start the dashboard"))?;
        Ok((Self { dashboard, key }, requested))
    }

    /// Logs the address, and shows the link if `shows_link`. Its key is in no log.
    pub(super) fn announce(
        &self,
        address: Option<SocketAddr>,
        shows_link: bool,
        progress: &Progress,
    ) {
        let Some(address) = address else { return };
        info!("dashboard at http://{address}/");
        if shows_link {
            progress.notice(Time::default(), format!("dashboard {}", self.key.link(address)));
        }
    }

    /// Waits until the history is stored. The job must have ended.
    pub(super) async fn end(self) {
        self.dashboard.end().await;
    }
}

/// Passes a request of the page on to the master.
pub(super) fn handle(
    request: PageRequest,
    spec: &JobSpec,
    escalation: &mut StopEscalation,
    commands: &mpsc::Sender<UserCommand>,
    inspector: &Inspector,
) {
    let PageRequest { command, reply } = request;
    let command = match command {
        PageCommand::Inspect => {
            let inspector = inspector.clone();
            tokio::spawn(async move {
                let inspection = inspector.inspect().await.map(|inspection| inspection.to_string());
                let answer = inspection.ok_or_else(|| "the job is ending".to_owned());
                // The page may have been closed.
                let _ = reply.send(answer);
            });
            return;
        }
        PageCommand::Scale(num_workers) => {
            let scaled = spec.scaled(num_workers, num_workers.into());
            scaled.map(|_| Some(UserCommand::Scale(num_workers.into())))
        }
        // A second request does not kill the job, as a second signal does.
        PageCommand::Stop if escalation.first().is_some() => Ok(None),
        PageCommand::Stop => Ok(escalation.command(Instant::now(), Stop::Terminated)),
    };
    let answer = command.and_then(|command| {
        let busy = |_| "the master is busy; try again".to_owned();
        command.map_or(Ok(()), |command| commands.try_send(command).map_err(busy))
    });
    // The page may have been closed.
    let _ = reply.send(answer.map(|()| String::new()));
}

const REQUESTS_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::job::testing::spec;
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn requests_are_checked_and_a_second_stop_kills_nothing() {
        let (spec, mut escalation) = (spec(), StopEscalation::new(Duration::from_secs(30)));
        let (commands, mut received) = mpsc::channel(4);
        let inspector = Inspector::without_master();
        let mut request = |command| {
            let (reply, mut answer) = oneshot::channel();
            let request = PageRequest { command, reply };
            handle(request, &spec, &mut escalation, &commands, &inspector);
            answer.try_recv().unwrap()
        };
        let [low, high] = [spec.max_workers, spec.max_workers + 1].map(PageCommand::Scale);
        let done = || Ok(String::new());
        assert_eq!(request(low), done());
        assert!(request(high).is_err());
        assert_eq!([PageCommand::Stop; 2].map(&mut request), [done(), done()]);
        let commands: Vec<_> = std::iter::from_fn(|| received.try_recv().ok()).collect();
        assert_eq!(commands, [UserCommand::Scale(spec.max_workers.into()), UserCommand::Stop]);
        assert_eq!(escalation.first().map(Stop::exit_code), Some(143));
    }
}
