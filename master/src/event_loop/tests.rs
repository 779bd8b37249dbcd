//! A master in a cluster whose lease runs out, seen by a worker.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse};
use elasticdl_proto::{LaunchId, Resume};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming};

use super::*;
use crate::job::testing::spec;
use crate::kube::anchor::{Anchor, AnchorWriter};
use crate::kube::events::EventRecorder;
use crate::kube::persisted_job::PersistedJobWriter;
use crate::kube::pods::PodFactory;
use crate::kube::testing::FakeServer;
use crate::token::Token;

struct MasterFixture {
    address: SocketAddr,
    token: Token,
    /// Sets the time for which the master holds its lease.
    hold: Box<dyn Fn(Duration)>,
    _fake: Arc<FakeServer>,
    _commands: mpsc::Sender<UserCommand>,
}

impl MasterFixture {
    async fn start() -> Self {
        let (fixture, master, received) = Self::assemble().await;
        tokio::spawn(master.run(received));
        fixture
    }

    /// The third master of a job in a cluster, and the commands that it takes.
    async fn assemble() -> (Self, Master, mpsc::Receiver<UserCommand>) {
        let (fake, cluster) = FakeServer::start();
        let meta = json!({"name": "job", "namespace": "ns", "uid": "anchor"});
        fake.put("configmaps", "job", json!({"metadata": meta, "data": {"task": "{}"}}));
        let meta = serde_json::from_value(meta).unwrap();
        let (lease_guard, hold) = LeaseGuard::for_test();
        let recorder = EventRecorder::start(&cluster, &meta);
        let factory = PodFactory::for_tests(meta, 1);
        let pods = Pods::new(&cluster, factory, lease_guard.clone(), recorder.clone());
        let anchor = Anchor::new(&cluster, "job");
        let seen = anchor.read().await.unwrap();
        let writer = AnchorWriter::begin(&anchor, &seen, 3).await.unwrap();
        let persisted_job = PersistedJobWriter::new(writer, lease_guard.clone(), recorder, None);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, token) = (listener.local_addr().unwrap(), Token::random().unwrap());
        let server_config = ServerConfig { listener, token: token.clone(), identity: None };
        let term = MasterTerm { incarnation: 3, lease_guard };
        let master = Master::assemble(MasterParts {
            job: Job::new(spec()),
            age: Duration::ZERO,
            server_config,
            backend: WorkerBackend::Pods(pods),
            job_store: JobStore::Anchor(persisted_job),
            term: Some(term),
            progress: Progress::quiet(),
            tracked: None,
        })
        .unwrap();
        let (commands, received) = mpsc::channel(1);
        let hold = Box::new(hold);
        let fixture = Self { address, token, hold, _fake: fake, _commands: commands };
        (fixture, master, received)
    }

    /// Opens the stream of a worker that was welcomed by the master with this incarnation before.
    async fn join(&self, incarnation: Option<u64>) -> Streaming<JoinResponse> {
        let worker = WorkerId(1);
        let hello = Hello {
            job: "job".into(),
            launch: LaunchId(1),
            address: "127.0.0.1:9".parse().unwrap(),
            pid: 1,
            resume: incarnation.map(|_| Resume {
                worker,
                membership: None,
                parameters: None,
                holds_state: false,
            }),
            incarnation: incarnation.unwrap_or_default(),
            location: Default::default(),
        };
        let (sender, outgoing) = mpsc::channel(1);
        sender.send(JoinRequest::Hello(Box::new(hello))).await.unwrap();
        // Keeps the stream open without further messages.
        tokio::spawn(async move { sender.closed().await });
        let mut request = Request::new(ReceiverStream::new(outgoing));
        request.metadata_mut().insert("authorization", self.token.to_bearer().parse().unwrap());
        let mut client = MasterClient::connect(format!("http://{}", self.address)).await.unwrap();
        client.join(request).await.unwrap().into_inner()
    }

    async fn listens(&self) -> bool {
        TcpStream::connect(self.address).await.is_ok()
    }

    async fn until(&self, listens: bool) {
        while self.listens().await != listens {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn a_master_whose_lease_is_not_renewed_disconnects_its_workers_until_it_is() {
    let fixture = MasterFixture::start().await;
    let mut stream = fixture.join(None).await;
    let Some(JoinResponse::Welcome(welcome)) = stream.message().await.unwrap() else {
        panic!("no welcome")
    };
    assert_eq!((welcome.worker, welcome.incarnation), (WorkerId(1), 3));
    (fixture.hold)(Duration::ZERO);
    while let Ok(Some(_)) = stream.message().await {}
    fixture.until(false).await;
    (fixture.hold)(Duration::from_secs(3600));
    fixture.until(true).await;
}

#[tokio::test]
async fn a_master_that_learns_of_a_newer_one_closes_its_listener_until_its_lease_is_confirmed() {
    let fixture = MasterFixture::start().await;
    // The same incarnation does not raise a doubt.
    let mut stream = fixture.join(Some(3)).await;
    while let Ok(Some(_)) = stream.message().await {}
    assert!(fixture.listens().await);
    let mut stream = fixture.join(Some(4)).await;
    assert!(
        stream.message().await.is_ok_and(|message| message.is_none()),
        "a worker of a newer master was answered"
    );
    fixture.until(false).await;
    (fixture.hold)(Duration::from_secs(1_000_000_000_000));
    fixture.until(true).await;
}

#[tokio::test]
async fn a_number_that_the_limits_do_not_allow_is_taken_with_the_limits_that_do() {
    let (_fixture, mut master, _received) = MasterFixture::assemble().await;
    let most = |max_workers| Scaling { max_workers: Some(max_workers), ..Scaling::default() };
    let desired = |master: &Master| master.job.status(master.now()).workers_desired;
    assert!(master.scale_as_requested(5.into()).is_err());
    assert_eq!(master.scale_as_requested(most(4)), Ok(3), "still too few");
    assert_eq!((desired(&master), master.requested()), (3, most(4)));
    assert_eq!(master.scale_as_requested(most(6)), Ok(3));
    assert_eq!((desired(&master), master.requested()), (5, most(6).or(5.into())));
    // What was refused is over with another number.
    assert!(master.scale_as_requested(7.into()).is_err());
    assert_eq!(master.scale_as_requested(2.into()), Ok(5));
    assert_eq!(master.scale_as_requested(most(8)), Ok(2));
    assert_eq!(desired(&master), 2);
}
