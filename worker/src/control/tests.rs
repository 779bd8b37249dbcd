//! The control stream against a minimal master.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;

use elasticdl_data::worker::with_patience;
use elasticdl_proto::wire::master_server::{Master, MasterServer};
use elasticdl_proto::wire::{
    CheckpointReply, CheckpointRequest, InspectRequest, ScaleReply, ScaleRequest, StatusRequest,
    SuspendReply, SuspendRequest,
};
use elasticdl_proto::{Finished, Location, MasterMessage, Membership, Resume, WorkerId};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Response, Status};

use elasticdl_proto::Generation;

use super::*;
use crate::environment::Tls;
use crate::session::control::tests::welcome;

type Outgoing = mpsc::UnboundedSender<Result<JoinResponse, Status>>;

/// Streams of workers, by number. Their messages are passed to the test, which sends the answers.
struct TestMaster {
    received: Sender<(usize, JoinRequest)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    /// Number of the first stream that is refused.
    refuse_from: usize,
    count: std::sync::atomic::AtomicUsize,
    /// Incarnation of this master.
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

#[tonic::async_trait]
impl Master for TestMaster {
    type JoinStream = UnboundedReceiverStream<Result<JoinResponse, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<JoinRequest>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        if number >= self.refuse_from {
            return Err(Status::failed_precondition("no longer wanted"));
        }
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let incarnation = self.incarnation.load(Ordering::Relaxed);
        outgoing.send(Ok(JoinResponse::Welcome(Box::new(welcome(7, incarnation))))).unwrap();
        self.streams.lock().unwrap().insert(number, outgoing);
        let (received, mut stream) = (self.received.clone(), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(request)) = stream.message().await {
                let is_heartbeat =
                    matches!(request, JoinRequest::Message(WorkerMessage::Heartbeat(_)));
                if !is_heartbeat && received.send((number, request)).is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(incoming)))
    }

    async fn status(
        &self,
        _: Request<StatusRequest>,
    ) -> Result<Response<elasticdl_proto::Status>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn inspect(
        &self,
        _: Request<InspectRequest>,
    ) -> Result<Response<elasticdl_proto::Inspection>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn checkpoint(
        &self,
        _: Request<CheckpointRequest>,
    ) -> Result<Response<CheckpointReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn scale(&self, _: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn suspend(&self, _: Request<SuspendRequest>) -> Result<Response<SuspendReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }
}

struct Fixture {
    environment: Environment,
    received: std::sync::mpsc::Receiver<(usize, JoinRequest)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

impl Fixture {
    fn new(refuse_from: usize) -> Self {
        Self::with(refuse_from, tonic::transport::Server::builder())
    }

    /// A master with the returned certificate, under the name `master`.
    fn over_tls() -> (Self, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(["master".into()])
            .unwrap()
            .self_signed(&key)
            .unwrap()
            .pem();
        let identity = tonic::transport::Identity::from_pem(&certificate, key.serialize_pem());
        let config = tonic::transport::ServerTlsConfig::new().identity(identity);
        (
            Self::with(usize::MAX, tonic::transport::Server::builder().tls_config(config).unwrap()),
            certificate,
        )
    }

    fn with(refuse_from: usize, mut server: tonic::transport::Server) -> Self {
        let (sender, received) = channel();
        let streams = Arc::default();
        let count = std::sync::atomic::AtomicUsize::default();
        let incarnation = Arc::new(2.into());
        let master = TestMaster {
            received: sender,
            streams: Arc::clone(&streams),
            refuse_from,
            count,
            incarnation: Arc::clone(&incarnation),
        };
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let environment = Environment {
            job_dir: None,
            master: listener.local_addr().unwrap().to_string(),
            master_file: None,
            job: "job".into(),
            launch: 3,
            token: "token".into(),
            tls: None,
            master_timeout: Duration::from_secs(60),
            location: Location::default(),
        };
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let incoming =
                    TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
                server
                    .add_service(MasterServer::new(master))
                    .serve_with_incoming(incoming)
                    .await
                    .unwrap();
            });
        });
        Self { environment, received, streams, incarnation }
    }

    fn address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 9).into()
    }

    fn hello(&self, resume: Option<Resume>) -> JoinRequest {
        let incarnation = if resume.is_some() { 2 } else { 0 };
        JoinRequest::Hello(Box::new(Hello {
            job: "job".into(),
            launch: LaunchId(3),
            address: Self::address(),
            pid: std::process::id(),
            resume,
            incarnation,
            location: Location::default(),
        }))
    }

    fn next(&self) -> (usize, JoinRequest) {
        loop {
            match self.next_of_any_kind() {
                // A wait of another test of this process.
                (_, JoinRequest::Message(WorkerMessage::StorageWait { .. })) => {}
                next => return next,
            }
        }
    }

    fn next_of_any_kind(&self) -> (usize, JoinRequest) {
        self.received.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// The number of a stream, and its next message after the hello.
    fn next_message(&self) -> (usize, WorkerMessage) {
        match self.next() {
            (number, JoinRequest::Message(message)) => (number, message),
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, number: usize, message: MasterMessage) {
        let response = JoinResponse::Message(message.into());
        self.streams.lock().unwrap()[&number].send(Ok(response)).unwrap();
    }

    fn end(&self, number: usize) {
        self.streams.lock().unwrap().remove(&number).unwrap();
    }
}

fn membership(generation: u64) -> Membership {
    let members = vec![(WorkerId(7), "127.0.0.1:9".parse().unwrap())].into();
    Membership { generation: Generation(generation), members, abort: false }
}

fn connector(environment: Environment) -> MasterConnector {
    MasterConnector { environment, address: Fixture::address() }
}

fn first_hello(connector: &MasterConnector) -> Hello {
    connector.hello(&ControlState::default())
}

fn lease_request(shards: u64) -> WorkerMessage {
    WorkerMessage::LeaseRequest { shards }
}

fn is_membership(event: &ControlEvent) -> bool {
    matches!(event, ControlEvent::Message(MasterMessage::Membership(_), _))
}

#[test]
fn a_new_master_learns_the_workers_identity_and_gets_no_message_for_the_previous_one() {
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    assert_eq!(fixture.next(), (0, fixture.hello(None)));
    control.outbox.send(WorkerMessage::Ready { parameters: 5 });
    control.outbox.note_state();
    assert_eq!(fixture.next_message(), (0, WorkerMessage::Ready { parameters: 5 }));
    fixture.send(0, MasterMessage::Membership(membership(3)));
    fixture.send(0, MasterMessage::Membership(membership(4)));
    // A late membership of an older generation is ignored.
    fixture.send(0, MasterMessage::Membership(membership(2)));
    assert!(is_membership(&control.inbox.recv().unwrap()));
    assert!(is_membership(&control.inbox.recv().unwrap()));
    assert!(is_membership(&control.inbox.recv().unwrap()));
    fixture.end(0);
    assert_eq!(control.inbox.recv().unwrap(), ControlEvent::Reconnected);
    let resume = Resume {
        worker: WorkerId(7),
        membership: Some(membership(4)),
        parameters: Some(5),
        holds_state: true,
    };
    assert_eq!(fixture.next(), (1, fixture.hello(Some(resume))));
    // The trainer has not read its inbox yet.
    control.outbox.send(lease_request(1));
    control.outbox.send(WorkerMessage::Reconnected { step: 6 });
    control.outbox.send(lease_request(2));
    let returned = WorkerMessage::Reconnected { step: 6 };
    assert_eq!(fixture.next_message(), (1, returned));
    assert_eq!(fixture.next_message(), (1, lease_request(2)));
    fixture.streams.lock().unwrap().clear();
    control.close();
}

#[test]
fn a_refusal_ends_the_search_for_a_master_and_silence_does_not() {
    let fixture = Fixture::new(0);
    let connector = connector(fixture.environment);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused =
        runtime.block_on(connector.search(first_hello(&connector), RETRY_FIRST)).err().unwrap();
    assert!(refused.contains("no longer wanted"), "{refused}");
    // A port without a listener.
    let gone = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let environment = Environment { master: gone.to_string(), ..connector.environment };
    let connector = MasterConnector { environment, ..connector };
    assert!(matches!(
        runtime.block_on(connector.open(&connector.environment.master, first_hello(&connector))),
        Err(NotOpened::NoAnswer(_))
    ));
}

#[test]
fn a_trainer_that_ends_without_a_master_ends_the_search() {
    let fixture = Fixture::new(1);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    fixture.send(0, MasterMessage::release("over"));
    let ended = control.inbox.recv().unwrap();
    assert!(matches!(ended, ControlEvent::Message(MasterMessage::Shutdown { .. }, _)));
    // A search for another master would find one that refuses the worker, which ends this process.
    fixture.end(0);
    control.close();
}

#[test]
fn over_tls_a_master_is_authenticated_by_ca_and_name_only() {
    let (fixture, ca) = Fixture::over_tls();
    let (_, other) = Fixture::over_tls();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let open = |tls: Option<(&str, &str)>| {
        let tls = tls.map(|(ca, name)| Tls { ca: ca.into(), name: name.into() });
        let environment = Environment { tls, ..fixture.environment.clone() };
        let connector = connector(environment);
        match runtime
            .block_on(connector.open(&connector.environment.master, first_hello(&connector)))
        {
            Ok(_) => Ok(()),
            // Another host may answer at this address later: the search continues.
            Err(NotOpened::NoAnswer(why)) => Err(why),
            Err(NotOpened::Refused(why)) => panic!("{why}"),
        }
    };
    assert_eq!(open(Some((&ca, "master"))), Ok(()));
    assert_eq!(fixture.next(), (0, fixture.hello(None)));
    let why = open(Some((&other, "master"))).unwrap_err();
    assert!(
        why.contains("invalid peer certificate") && why.contains(&fixture.environment.master),
        "{why}"
    );
    let why = open(Some((&ca, "cifar-master"))).unwrap_err();
    assert!(why.contains("not valid for name \"cifar-master\""), "{why}");
    assert!(open(None).is_err());
    let without_tls = Fixture::new(usize::MAX);
    let tls = Some(Tls { ca, name: "master".into() });
    let environment = Environment { tls, ..without_tls.environment };
    let connector = connector(environment);
    let opened =
        runtime.block_on(connector.open(&connector.environment.master, first_hello(&connector)));
    assert!(matches!(opened, Err(NotOpened::NoAnswer(_))));
    // No message has reached another master.
    assert!(fixture.received.try_recv().is_err() && without_tls.received.try_recv().is_err());
}

#[test]
fn an_older_master_than_the_known_one_is_not_accepted_and_the_search_continues() {
    use std::sync::atomic::Ordering::Relaxed;
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    assert!(matches!(fixture.next(), (0, JoinRequest::Hello(_))));
    fixture.incarnation.store(1, Relaxed);
    fixture.end(0);
    // The worker reaches the old master repeatedly, and tells it of the newer one.
    for number in 1..=2 {
        match fixture.next() {
            (n, JoinRequest::Hello(hello)) => assert_eq!((n, hello.incarnation), (number, 2)),
            other => panic!("{other:?}"),
        }
    }
    assert!(control.inbox.try_recv().is_err(), "it continued with an older master");
    fixture.incarnation.store(3, Relaxed);
    assert_eq!(control.inbox.recv().unwrap(), ControlEvent::Reconnected);
    let last = *fixture.streams.lock().unwrap().keys().next_back().unwrap();
    fixture.end(last);
    let newest =
        std::iter::repeat_with(|| fixture.next()).find_map(|(_, received)| match received {
            JoinRequest::Hello(hello) => Some(hello.incarnation).filter(|&newest| newest > 2),
            _ => None,
        });
    assert_eq!(newest, Some(3));
    fixture.streams.lock().unwrap().clear();
    drop(control);
}

#[test]
fn a_stop_is_known_before_the_trainer_hears_of_it() {
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    fixture.send(0, MasterMessage::Membership(membership(3)));
    assert!(is_membership(&control.inbox.recv().unwrap()));
    assert!(!control.stops.load(Ordering::Acquire));
    fixture.send(0, MasterMessage::Drain);
    assert!(matches!(control.inbox.recv(), Ok(ControlEvent::Message(MasterMessage::Drain, _))));
    assert!(control.stops.load(Ordering::Acquire));
    fixture.streams.lock().unwrap().clear();
    drop(control);
}

#[test]
fn the_master_hears_of_a_wait_before_the_end_that_followed_it() {
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    let finished = WorkerMessage::Finished(Finished {
        generation: Generation(3),
        step: 5,
        digest: 1,
        records_trained: 20,
        ..Finished::default()
    });
    // One heartbeat of this job, at its start, may report a wait, too.
    for _ in 0..3 {
        let sleep = |_| {
            std::thread::sleep(Duration::from_millis(5));
            false
        };
        with_patience("s3://b", Duration::from_secs(60), "away", || Ok(()), sleep).unwrap();
        control.outbox.send(finished.clone());
        let mut waits = 0;
        loop {
            match fixture.next_of_any_kind() {
                (_, JoinRequest::Message(WorkerMessage::StorageWait { .. })) => waits += 1,
                (_, JoinRequest::Message(message)) => break assert_eq!(message, finished),
                (_, JoinRequest::Hello(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(waits > 0);
    }
    fixture.streams.lock().unwrap().clear();
    drop(control);
}
