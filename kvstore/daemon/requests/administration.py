"""Requests about the daemon, tenants and whole namespaces: status, commands, recordings, deletion."""

from __future__ import annotations

from kvstore.daemon.requests.namespaces import find
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.types import check_tenant
from kvstore.wire import messages as m

_ASK = "ask the operator of the daemon"


def ping(session: Session, q: m.Ping) -> None:
    """Answers with 0."""
    session.send(m.Value(q.id, 0))


def trace_context(session: Session, q: m.TraceContext) -> None:
    """Keeps the caller's span of the next request."""
    if session.traces is not None:
        session.traces.note(q)


def status(session: Session, q: m.Status) -> None:
    """Answers with the state of the daemon that the peer may see."""
    session.send(m.Report(q.id, session.services.status.of(session.principal)))


def control(session: Session, q: m.Control) -> None:
    """Runs an operator command."""
    if not session.principal.operator:
        raise DeniedError("only operators may ask this", _ASK)
    answer = session.services.commands.run(session, q.id, q.call, q.arguments)
    if answer is not None:
        session.send(m.Report(q.id, answer))


def start_recording(session: Session, q: m.RecordStart) -> None:
    """Starts a recording of requests, which this connection owns."""
    if not session.principal.operator:
        raise DeniedError("only operators record what is asked for", _ASK)
    session.services.recorder.start(session.number, q.seconds, q.max_bytes)
    # Only requests are recorded.
    session.services.presence.retire_all()
    session.send(m.Value(q.id, 0))


def read_recording(session: Session, q: m.RecordRead) -> None:
    """Answers with the requests recorded since the last read."""
    recorder = session.services.recorder
    if recorder.owner != session.number:
        raise DeniedError("this connection records nothing", "start a recording first")
    session.send(m.Recorded(q.id, *recorder.read()))


def publish(session: Session, q: m.Publish) -> None:
    """Sets the tenants that may read a namespace."""
    namespace = find(session, q, own=not session.principal.operator)
    readers = [check_tenant(name) for name in q.tenants]
    session.services.catalog.publish(session, q.id, namespace, readers)


def forget(session: Session, q: m.Forget) -> None:
    """Deletes the blocks of one namespace, or of all of the tenant's with a model and revision."""
    who, services = session.principal, session.services
    if q.namespace:
        namespaces = [find(session, q, own=not who.operator)]
    else:
        namespaces = services.namespaces.of(who.tenant, q.revision, q.model)
    if namespaces:
        services.deletion.forget(session, q.id, namespaces)
    else:
        session.send(m.Value(q.id, 0))


def delete_tenant(session: Session, q: m.DeleteTenant) -> None:
    """Deletes everything that a tenant has stored."""
    who, services = session.principal, session.services
    if q.name != who.name and not who.operator:
        raise DeniedError("only operators delete other tenants", _ASK)
    if services.authenticator.number(q.name) is None:
        raise DeniedError(f"there is no tenant {q.name!r}", "`kvstore tenant list` names them")
    services.deletion.delete(session, q.id, q.name)
