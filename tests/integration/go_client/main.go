// A client of /api/v1 in another language: it creates a session, polls it, uploads a file, runs code
// on it and deletes the session. Its structs are strict about whole numbers.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"time"
)

type Session struct {
	ID        string `json:"session_id"`
	Status    string `json:"status"`
	CreatedAt int64  `json:"created_at"`
	TTL       int64  `json:"ttl"`
}

type Run struct {
	Status string `json:"status"`
	Stdout string `json:"stdout"`
}

func call(method, path, media string, body io.Reader, status int, into any) {
	request, err := http.NewRequest(method, os.Args[1]+"/api/v1"+path, body)
	check(err)
	request.Header.Set("Authorization", "Bearer "+os.Getenv("SBX_KEY"))
	request.Header.Set("Content-Type", media)
	reply, err := http.DefaultClient.Do(request)
	check(err)
	defer reply.Body.Close()
	content, err := io.ReadAll(reply.Body)
	check(err)
	if reply.StatusCode != status {
		check(fmt.Errorf("%s %s: %d: %s", method, path, reply.StatusCode, content))
	}
	if into != nil {
		check(json.Unmarshal(content, into))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func object(value any) io.Reader {
	text, err := json.Marshal(value)
	check(err)
	return bytes.NewReader(text)
}

func main() {
	const kind = "application/json"
	var session Session
	who := map[string]string{"user_id": "gopher", "agent_id": "go"}
	call("POST", "/sessions", kind, object(who), 201, &session)
	for deadline := time.Now().Add(time.Minute); session.Status != "running"; time.Sleep(50 * time.Millisecond) {
		call("GET", "/sessions/"+session.ID, kind, nil, 200, &session)
		if time.Now().After(deadline) {
			check(fmt.Errorf("the session is still %s", session.Status))
		}
	}
	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	check(parts.WriteField("conversation_id", "c1"))
	file, err := parts.CreateFormFile("file", "numbers.csv")
	check(err)
	fmt.Fprint(file, "n\n1\n2\n39\n")
	check(parts.Close())
	call("POST", "/sessions/"+session.ID+"/files/upload", parts.FormDataContentType(), &form, 201, nil)
	code := "print(sum(map(int, open('/workspace/uploads/temparea/numbers.csv').read().split()[1:])))"
	var run Run
	execution := map[string]string{"conversation_id": "c1", "code": code}
	call("POST", "/sessions/"+session.ID+"/execute", kind, object(execution), 200, &run)
	call("DELETE", "/sessions/"+session.ID, kind, nil, 204, nil)
	fmt.Printf("%s %d %s %s", session.ID, session.TTL, run.Status, run.Stdout)
}
