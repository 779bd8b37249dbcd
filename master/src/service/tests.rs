//! The server over real connections: what it accepts, what it refuses, and the events it emits.

mod tls;

use std::net::{Ipv4Addr, SocketAddr};

use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::{
    Generation, LaunchId, MasterMessage, Membership, RecordRange, Resume, WorkerId,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::*;

const MUCH_LATER: Duration = Duration::from_secs(3600);

struct ServerFixture {
    address: SocketAddr,
    /// Endpoint of the server for clients.
    endpoint: Endpoint,
    token: Token,
    events: mpsc::Receiver<ServerEvent>,
    server: Server,
}

/// The worker's side of a stream.
struct Stream {
    outgoing: mpsc::Sender<JoinRequest>,
    incoming: Streaming<JoinResponse>,
}

impl ServerFixture {
    async fn start() -> Self {
        Self::start_with(None, |address| {
            Endpoint::from_shared(format!("http://{address}")).unwrap()
        })
        .await
    }

    async fn start_with(
        identity: Option<Identity>,
        endpoint: impl Fn(SocketAddr) -> Endpoint,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let token = Token::random().unwrap();
        let (sender, events) = mpsc::channel(16);
        let server_config = ServerConfig { listener, token: token.clone(), identity };
        let server = Server::start_here(server_config, "mnist", sender);
        Self { address, endpoint: endpoint(address), token, events, server }
    }

    async fn client(&self) -> MasterClient<Channel> {
        MasterClient::new(self.endpoint.connect().await.unwrap())
    }

    /// Opens a stream with the right token and sends `messages`.
    async fn join(&self, messages: Vec<JoinRequest>) -> Stream {
        let (outgoing, received) = mpsc::channel(64);
        for message in messages {
            outgoing.send(message).await.unwrap();
        }
        let request = with_token(ReceiverStream::new(received), &self.token.to_bearer());
        let incoming = self.client().await.join(request).await.unwrap().into_inner();
        Stream { outgoing, incoming }
    }

    /// Opens a stream that sends a hello, and takes its outbox from the event queue.
    async fn admitted(&mut self) -> (Stream, ConnectionId, WorkerOutbox) {
        let stream = self.join(vec![hello()]).await;
        match self.events.recv().await {
            Some(ServerEvent::Connected { connection, outbox, .. }) => (stream, connection, outbox),
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that a connection that has authenticated may be silent.
    async fn assert_silence_is_allowed(mut self) {
        let (stream, connection, _outbox) = self.admitted().await;
        tokio::time::pause();
        let closed = tokio::time::timeout(MUCH_LATER, self.events.recv()).await;
        assert!(closed.is_err(), "{connection:?} was closed: {closed:?}");
        tokio::time::resume();
        drop(stream);
    }

    /// Asserts that the event queue is empty and that the server serves requests, by answering one
    /// status request.
    async fn assert_nothing_reached_the_queue(&mut self) {
        let (mut client, bearer) = (self.client().await, self.token.to_bearer());
        let asked =
            tokio::spawn(async move { client.status(with_token(StatusRequest, &bearer)).await });
        match self.events.recv().await {
            Some(ServerEvent::Status { reply }) => drop(reply),
            other => panic!("{other:?}"),
        }
        assert_eq!(asked.await.unwrap().unwrap_err().code(), Code::Unavailable);
    }
}

impl Stream {
    /// Reads the stream to its end and returns its status code.
    async fn end(mut self) -> Code {
        loop {
            match self.incoming.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Code::Ok,
                Err(status) => return status.code(),
            }
        }
    }
}

fn with_token<T>(message: T, authorization: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", authorization.parse().unwrap());
    request
}

fn valid_hello() -> Hello {
    Hello {
        job: "mnist".into(),
        launch: LaunchId(7),
        address: "127.0.0.1:9".parse().unwrap(),
        pid: 42,
        resume: None,
        incarnation: 0,
        location: Default::default(),
    }
}

fn hello() -> JoinRequest {
    JoinRequest::Hello(Box::new(valid_hello()))
}

#[tokio::test]
async fn without_the_jobs_token_no_call_is_served() {
    let mut fixture = ServerFixture::start().await;
    let other = Token::random().unwrap().to_bearer();
    for wrong in [None, Some(""), Some(other.as_str()), Some(&fixture.token.to_hex())] {
        let request = |message| match wrong {
            Some(shown) => with_token(message, shown),
            None => Request::new(message),
        };
        let mut client = fixture.client().await;
        let status = client.status(request(StatusRequest)).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{wrong:?}");
        let scale = Request::from_parts(
            request(StatusRequest).metadata().clone(),
            tonic::Extensions::default(),
            ScaleRequest::default(),
        );
        assert_eq!(
            client.scale(scale).await.unwrap_err().code(),
            Code::Unauthenticated,
            "{wrong:?}"
        );
        let join = Request::from_parts(
            request(StatusRequest).metadata().clone(),
            tonic::Extensions::default(),
            tokio_stream::once(hello()),
        );
        assert_eq!(client.join(join).await.unwrap_err().code(), Code::Unauthenticated, "{wrong:?}");
    }
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_busy_job_delays_neither_handshakes_nor_the_limits_of_connections() {
    let mut fixture = ServerFixture::start().await;
    // As a master does: in another thread.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, events) = mpsc::channel(16);
    let server_config = ServerConfig { listener, token: fixture.token.clone(), identity: None };
    let server = Server::start(server_config, "mnist", None, sender).unwrap();
    // This runtime's only thread blocks until the server has answered the HTTP/2 preface.
    let mut peer = std::net::TcpStream::connect(address).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    io::Write::write_all(&mut peer, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    assert!(io::Read::read(&mut peer, &mut [0; 1024]).unwrap() > 0);
    // It serves the same events, and ends in time although the peer is still connected.
    fixture.endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    (fixture.address, fixture.events) = (address, events);
    let (stream, _, outbox) = fixture.admitted().await;
    drop(outbox);
    assert_eq!(stream.end().await, Code::Ok);
    server.end().await;
    while TcpStream::connect(address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn the_events_of_a_stream_reach_the_queue_in_order() {
    let mut fixture = ServerFixture::start().await;
    let (stream, connection, outbox) = fixture.admitted().await;
    stream.outgoing.send(JoinRequest::Message(WorkerMessage::Leaving)).await.unwrap();
    let leaving = fixture.events.recv().await;
    assert!(
        matches!(
            &leaving,
            Some(ServerEvent::Message { connection: c, message: WorkerMessage::Leaving })
                if *c == connection
        ),
        "{leaving:?}"
    );
    drop(stream);
    let closed = fixture.events.recv().await;
    assert!(
        matches!(&closed, Some(ServerEvent::Closed { connection: c }) if *c == connection),
        "{closed:?}"
    );
    drop(outbox);
}

#[tokio::test]
async fn an_outbox_sends_messages_in_order_and_its_drop_ends_the_stream() {
    let mut fixture = ServerFixture::start().await;
    let (mut stream, _, outbox) = fixture.admitted().await;
    let lease = |start| MasterMessage::Lease(vec![RecordRange { epoch: 0, start, end: start + 1 }]);
    for start in 0..100 {
        assert!(outbox.send(lease(start).into()));
    }
    drop(outbox);
    for start in 0..100 {
        assert_eq!(
            stream.incoming.message().await.unwrap(),
            Some(JoinResponse::Message(lease(start).into()))
        );
    }
    assert_eq!(stream.end().await, Code::Ok);
}

#[tokio::test]
async fn a_refused_worker_receives_the_reason() {
    let mut fixture = ServerFixture::start().await;
    let (mut stream, _, outbox) = fixture.admitted().await;
    outbox.refuse("no such launch".into());
    let status = stream.incoming.message().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "no such launch"));
}

#[tokio::test]
async fn the_outbox_of_a_worker_that_does_not_read_is_bounded() {
    let mut fixture = ServerFixture::start().await;
    let (_stream, _, outbox) = fixture.admitted().await;
    // Nothing is awaited in the loop, so the server's tasks do not run.
    let taken =
        (0..10 * OUTBOX_MAX).take_while(|_| outbox.send(MasterMessage::Drain.into())).count();
    assert_eq!(taken, OUTBOX_MAX);
}

#[tokio::test]
async fn a_stream_without_a_valid_hello_ends_without_an_event() {
    let mut fixture = ServerFixture::start().await;
    let other_job = Hello { job: "other".into(), ..valid_hello() };
    let no_process = Hello { pid: 0, ..valid_hello() };
    let first_messages = [
        JoinRequest::Message(WorkerMessage::Leaving),
        JoinRequest::Invalid("a message without a kind".into()),
        JoinRequest::Hello(Box::new(other_job)),
        JoinRequest::Hello(Box::new(no_process)),
    ];
    for message in first_messages {
        let stream = fixture.join(vec![message.clone()]).await;
        assert_eq!(stream.end().await, Code::InvalidArgument, "{message:?}");
    }
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_stream_that_never_sends_a_hello_is_closed() {
    let mut fixture = ServerFixture::start().await;
    let stream = fixture.join(Vec::new()).await;
    // With paused time, the clock advances whenever all tasks are idle.
    tokio::time::pause();
    let ended = tokio::time::timeout(MUCH_LATER, stream.end()).await;
    assert_eq!(ended.unwrap(), Code::DeadlineExceeded);
    tokio::time::resume();
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_malformed_message_ends_its_stream_alone() {
    let mut fixture = ServerFixture::start().await;
    let (_bystander, _, _open) = fixture.admitted().await;
    let (stream, connection, _outbox) = fixture.admitted().await;
    stream
        .outgoing
        .send(JoinRequest::Message(WorkerMessage::Ready { parameters: 0 }))
        .await
        .unwrap();
    let closed = fixture.events.recv().await;
    assert!(
        matches!(&closed, Some(ServerEvent::Closed { connection: c }) if *c == connection),
        "{closed:?}"
    );
    assert_eq!(stream.end().await, Code::InvalidArgument);
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_message_over_the_limit_ends_its_stream() {
    let mut fixture = ServerFixture::start().await;
    let (stream, connection, _outbox) = fixture.admitted().await;
    let error = "x".repeat(MESSAGE_BYTES_MAX + 1);
    let failed = WorkerMessage::Failed { error, ranges: Vec::new(), fatal: false, exported: false };
    stream.outgoing.send(JoinRequest::Message(failed)).await.unwrap();
    let closed = fixture.events.recv().await;
    assert!(
        matches!(&closed, Some(ServerEvent::Closed { connection: c }) if *c == connection),
        "{closed:?}"
    );
}

#[tokio::test]
async fn bytes_that_are_not_http2_have_no_effect() {
    let mut fixture = ServerFixture::start().await;
    let mut xorshift = 0x9e37_79b9_7f4a_7c15_u64;
    let mut garbage = vec![0; 4096];
    for byte in &mut garbage {
        xorshift ^= xorshift << 13;
        xorshift ^= xorshift >> 7;
        xorshift ^= xorshift << 17;
        *byte = xorshift as u8;
    }
    let mut broken_frame = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    broken_frame.extend_from_slice(&garbage);
    for bytes in [garbage.as_slice(), b"GET / HTTP/1.1\r\n\r\n", &broken_frame] {
        let mut stream = TcpStream::connect(fixture.address).await.unwrap();
        // The server may close the connection during the write.
        let _ = stream.write_all(bytes).await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_silent_connection_is_closed_in_time() {
    let fixture = ServerFixture::start().await;
    let mut stream = TcpStream::connect(fixture.address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    // The server has answered the preface, so it has accepted the connection.
    assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
    tokio::time::pause();
    // A reset also ends the connection.
    let mut rest = Vec::new();
    assert!(tokio::time::timeout(MUCH_LATER, stream.read_to_end(&mut rest)).await.is_ok());
}

#[tokio::test]
async fn an_authenticated_connection_may_be_silent() {
    ServerFixture::start().await.assert_silence_is_allowed().await;
}

#[tokio::test]
async fn a_scale_request_is_answered_by_the_job() {
    let mut fixture = ServerFixture::start().await;
    let (mut client, bearer) = (fixture.client().await, fixture.token.to_bearer());
    let request = ScaleRequest { num_workers: Some(5), min_workers: None, max_workers: Some(9) };
    let expected = Scaling { num_workers: Some(5), min_workers: None, max_workers: Some(9) };
    let request = with_token(request, &bearer);
    let asked = tokio::spawn(async move { client.scale(request).await });
    match fixture.events.recv().await {
        Some(ServerEvent::Scale { change, reply }) if change == expected => {
            reply.send(Ok(3)).unwrap();
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(asked.await.unwrap().unwrap().into_inner().was, 3);
}

#[tokio::test]
async fn a_hello_reaches_the_queue_with_every_field() {
    let mut fixture = ServerFixture::start().await;
    let members = vec![(WorkerId(1), "127.0.0.1:8".parse().unwrap())].into();
    let membership = Some(Membership { generation: Generation(5), members, abort: true });
    let resume =
        Some(Resume { worker: WorkerId(3), membership, parameters: Some(9), holds_state: true });
    let again = Hello { resume, incarnation: 2, ..valid_hello() };
    for sent in [valid_hello(), again] {
        let _stream = fixture.join(vec![JoinRequest::Hello(Box::new(sent.clone()))]).await;
        match fixture.events.recv().await {
            Some(ServerEvent::Connected { hello, .. }) => assert_eq!(*hello, sent),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_closed_server_refuses_connections_and_streams_until_it_is_reopened() {
    let mut fixture = ServerFixture::start().await;
    let (stream, _, outbox) = fixture.admitted().await;
    let mut old = fixture.client().await;
    fixture.server.close();
    drop(outbox);
    assert_eq!(stream.end().await, Code::Ok);
    let hello = || ReceiverStream::new(mpsc::channel::<JoinRequest>(1).1);
    let refused = old.join(with_token(hello(), &fixture.token.to_bearer())).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    while TcpStream::connect(fixture.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    fixture.server.reopen();
    while TcpStream::connect(fixture.address).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let _ = fixture.admitted().await;
}
